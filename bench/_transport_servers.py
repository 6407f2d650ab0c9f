"""The other end of `bench transport`: one process that answers over shared memory, our gRPC stream and grpcio unary.

Every request is answered from memory that is there already: a push by 8 bytes, a pull by as many as it asks for.
A context manager owns the process; it ends on any way out, and with its parent.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import grpc

from penstock.ps.transport.local import LineServer
from penstock.ps.transport.tcp import TcpServer
from penstock.ps.wire import Message, WireTensor

JOB, TOKEN = "bench", "token"
START_TIMEOUT_S = 60
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def message(kind: str, data: memoryview, asked: int = 0) -> Message:
    """Make a message of `kind` with one tensor; `asked` bytes are wanted back."""
    sender: dict[str, Any] = {"job": JOB, "trainer": 0, "epoch": 0}
    fields = {"push": {**sender, "round": asked, "block": "w"}, "answer": {"round": 0, "staleness": 0}}[kind]
    return Message(kind, fields, [WireTensor("w", "uint8", (len(data),), data)])


def serve(largest: int, parent: Connection) -> None:
    """Serve until the parent closes its end of the pipe, be it because it died."""
    memory = memoryview(bytes(range(256)) * (largest // 256))

    def handler(request: Message) -> Message:
        return message("answer", memory[: int(request.fields["round"])])

    def unary(request: bytes, context: Any) -> bytes:
        asked = int.from_bytes(request[:8], "little")
        return answers[asked]

    answers = {size: bytes(memory[:size]) for size in {0, *(1 << k for k in range(10, 40) if 1 << k <= largest)}}
    local = LineServer(handler, job=JOB, token=TOKEN)
    remote = TcpServer(handler, address="127.0.0.1:0", job=JOB, token=TOKEN)
    plain = grpc.server(ThreadPoolExecutor(2), options=UNLIMITED)
    method: Any = grpc.unary_unary_rpc_method_handler(unary)  # no serialisers: raw bytes, as fast as it goes
    plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Call": method}),))
    port = plain.add_insecure_port("127.0.0.1:0")
    plain.start()
    parent.send((local.address, remote.port, port))
    parent.poll(None)
    plain.stop(grace=None).wait()
    remote.close()
    local.close()


class Servers:
    """The process. Enter to start it: `local`, `remote` and `plain` say where it listens."""

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        start: Callable[[int, Connection], None] = serve
        self._process = context.Process(target=start, args=(self._largest, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_TIMEOUT_S):
            self._stop()
            raise RuntimeError(f"the servers are not ready after {START_TIMEOUT_S} s")
        self.local, remote, plain = self._pipe.recv()
        self.remote, self.plain = f"127.0.0.1:{remote}", f"127.0.0.1:{plain}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()
