"""A node whose clock is wrong by a known time: speaks an agent's protocol, with one trainer that trains nothing.

Its clock offset is not sent as such: it is estimated from heartbeats, by the class that real agents use.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
from tests.e2e.conftest import RunningServer
from websockets.sync.client import ClientConnection, connect

from penstock.protocol.clocks import ClockOffset, ClockWatch
from penstock.protocol.frames import FLAG_WHOLE_STEP, Array, Column, Frame, Kind, encode
from penstock.protocol.graphdoc import GraphDocument, graph_hash

LIMIT_S = 60.0
ROUND_TRIPS = 8


class SkewedNode:
    """Not thread-safe. `skew_ns`: how far its clock is ahead of this machine's. `join` first, then as a context."""

    def __init__(self, server: RunningServer, name: str, skew_ns: int) -> None:
        self._server, self._skew_ns, self._clocks = server, skew_ns, ClockWatch()
        join_token = server.call("POST", "/join-tokens")["token"]
        body = {"join_token": join_token, "name": name, "host": f"{name}.test", "cpus": 1, "gpus": 0}
        joined = server.call("POST", "/nodes", {**body, "memory_bytes": 8 << 30, "version": "1"})
        self._token: str = joined["node_token"]
        self._open = ExitStack()
        self._replica: dict[str, Any] = {}
        self._seq = 0

    def __enter__(self) -> SkewedNode:
        url = self._server.url.replace("http", "ws", 1) + "/api/v1/agent"
        headers = {"Authorization": f"Bearer {self._token}"}
        connection = connect(url, additional_headers=headers, compression=None, max_size=None)
        self._socket: ClientConnection = self._open.enter_context(connection)
        ports = list(range(20_000, 20_004))
        self._say(
            type="hello",
            version="1",
            boot_id="b",
            replicas=[],
            address="127.0.0.1",
            ports=ports,
            labels={"zone": "east"},
        )
        self._hear("welcome")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.close()

    def now_ns(self) -> int:
        """The time by this node's clock."""
        return time.time_ns() + self._skew_ns

    def find_clock(self) -> ClockOffset:
        """Send heartbeats until the server knows the clock; return the estimate that it has."""
        for _ in range(ROUND_TRIPS + 1):
            known = self._clocks.offset
            clock = {} if known is None else {"clock": known.model_dump()}
            self._clocks.sent(self.now_ns())
            self._say(type="beat", cpu_percent=0.0, memory_used_bytes=0, **clock)
            answer = self._hear("lease")
            self._clocks.returned(answer["received_ns"], answer["answered_ns"], self.now_ns())
        assert known is not None
        return known

    def say_load(self, *, cpu_percent: float, memory_used_bytes: int) -> None:
        """Send a heartbeat with what the machine does, and wait for its answer."""
        self._say(type="beat", cpu_percent=cpu_percent, memory_used_bytes=memory_used_bytes)
        self._hear("lease")

    def start(self) -> int:
        """Wait for a trainer to run, and report that it does; return its index."""
        while not self._replica:
            self._replica = next(iter(self._hear("desired")["replicas"]), {})
        who = {"replica_id": self._replica["replica_id"], "epoch": self._replica["epoch"], "pid": 99}
        for state in ("PREPARING", "RUNNING"):
            self._say(type="replica", state=state, **who)
        self._json(Kind.HELLO, {"role": "trainer", "index": self._replica["index"], "host": "h", "pid": 99,
                                "program": "train.py", "version": "0.1.0"})  # fmt: skip
        return int(self._replica["index"])

    def graph(self, document: GraphDocument) -> None:
        """Use a graph."""
        self._json(Kind.GRAPH, document.model_dump(mode="json"))
        self._json(Kind.GRAPH_USED, {"hash": graph_hash(document)})

    def step(self, step: int, began_ns: int, columns: dict[Column, Array]) -> None:
        """Send a whole step that began at a time of this machine's clock."""
        self._frame(Kind.OP_EVENTS, began_ns + self._skew_ns, step, FLAG_WHOLE_STEP, columns=columns)

    def _json(self, kind: Kind, body: dict[str, Any]) -> None:
        self._frame(kind, self.now_ns(), 0, 0, body=body)

    def _frame(self, kind: Kind, t0_ns: int, step: int, flags: int, **content: Any) -> None:
        stream, epoch = self._replica["stream"], self._replica["epoch"]
        self._socket.send(encode(Frame(kind, stream, epoch, self._seq, t0_ns, step, flags, **content)))
        self._seq += 1

    def _say(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))

    def _hear(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind; what else comes is left."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            message: dict[str, Any] = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message["type"] == kind:
                return message
        raise TimeoutError(f"the server sent no {kind!r} within {LIMIT_S} s")


def one_operator(start_ns: int, duration_ns: int) -> dict[Column, Array]:
    """Return the columns of a step of one run of operator 0."""
    values = {Column.START_NS: start_ns, Column.DURATION_NS: duration_ns, Column.OP: 0, Column.THREAD: 0}
    return {column: np.array([value]) for column, value in values.items()}
