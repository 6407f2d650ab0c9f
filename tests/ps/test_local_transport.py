"""Calls on one host: shared memory, its absence, deadlines, kills, strangers and garbage."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.capabilities import absent
from tests.support.waiting import LIMIT_S

from penstock.errors import PeerError, Unavailable
from penstock.ps.transport import frames
from penstock.ps.transport.frames import Closed, Line, make_region, receive_region
from penstock.ps.transport.local import MAX_UNKNOWN, Guarded, Handler, LineServer, LocalClient
from penstock.ps.wire import Message, WireTensor, encode

Array = npt.NDArray[Any]
SENDER: dict[str, Any] = {"job": "j", "trainer": 0, "epoch": 0}


def push(values: Array, round: int = 0) -> Message:
    """Return a push of one array."""
    tensor = WireTensor("w", str(values.dtype), values.shape, memoryview(values.tobytes()))
    return Message("push", {**SENDER, "round": round, "block": "w"}, [tensor])


def values_of(message: Message) -> Array:
    """Return a copy of a message's only tensor."""
    (tensor,) = message.tensors
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape).copy()


def doubled(message: Message) -> Message:
    """Answer with twice the values."""
    result = values_of(message) * 2
    tensor = WireTensor("w", str(result.dtype), result.shape, memoryview(result.tobytes()))
    return Message("answer", {"round": int(message.fields["round"]), "staleness": 0}, [tensor])


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[LineServer, LocalClient]]]:
    made: list[Any] = []

    def start(handler: Handler = doubled, token: str = "t") -> tuple[LineServer, LocalClient]:
        server = LineServer(handler, job="j", token="t")
        client = LocalClient(server.address, job="j", token=token)
        made.extend([client, server])
        return server, client

    yield start
    for one in made:
        one.close()


Serve = Callable[..., tuple[LineServer, LocalClient]]


@pytest.mark.parametrize("count", [0, 1, 4000, 5000, 3_000_000, 70])
def test_tensors_arrive_unchanged_whatever_their_size(serve: Serve, count: int) -> None:
    _, client = serve()
    values = np.arange(count, dtype=np.float32)
    for _ in range(2):
        with client.call(push(values, 3), deadline_s=LIMIT_S) as answer:
            assert answer.fields == {"round": 3, "staleness": 0}
            assert np.array_equal(values_of(answer), values * 2)


def test_large_tensors_lie_in_memory_that_both_sides_share(serve: Serve) -> None:
    _, client = serve()
    with client.call(push(np.ones(1_000_000, np.float32)), deadline_s=LIMIT_S) as answer:
        view = answer.tensors[0].data
        assert type(view.obj).__name__ == "mmap"


def test_without_shared_memory_the_bytes_go_through_the_socket(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(at_least: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frames, "make_region", short)
    _, client = serve()
    values = np.random.default_rng(0).normal(size=2_000_000)
    for _ in range(2):
        with client.call(push(values), deadline_s=LIMIT_S) as answer:
            assert np.array_equal(values_of(answer), values * 2)
            assert type(answer.tensors[0].data.obj) is not memoryview
    why = "bodies of messages go through the socket, since shared memory cannot be had: No space left on device"
    assert caplog.messages.count(why) == 1


def test_without_sealed_memory_bytes_go_through_the_socket(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    _, client = serve()
    values = np.random.default_rng(0).normal(size=200_000)
    with absent("memfd"):
        for _ in range(2):
            with client.call(push(values), deadline_s=LIMIT_S) as answer:
                assert np.array_equal(values_of(answer), values * 2)
                assert type(answer.tensors[0].data.obj).__name__ == "bytearray"
    why = "bodies of messages go through the socket, since shared memory cannot be had"
    assert caplog.text.count(why) == 1


def test_calls_at_once_have_connections_of_their_own(serve: Serve) -> None:
    together = threading.Barrier(4, timeout=LIMIT_S)

    def meet(message: Message) -> Message:
        together.wait()
        return doubled(message)

    _, client = serve(meet)
    results: list[Array] = [np.empty(0)] * 4

    def work(number: int) -> None:
        with client.call(push(np.full(100_000, number, np.int64)), deadline_s=LIMIT_S) as answer:
            results[number] = values_of(answer)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(r.tolist()) for r in results] == [{0}, {2}, {4}, {6}]


def test_a_wrong_token_is_refused_before_anything_is_read(serve: Serve) -> None:
    seen: list[Message] = []

    def note(message: Message) -> Message:
        seen.append(message)
        return doubled(message)

    _, client = serve(note, token="guessed")
    with pytest.raises(PeerError, match="the job or its token is wrong"):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)
    assert seen == []


def test_an_answer_that_does_not_come_ends_at_the_deadline(serve: Serve) -> None:
    release = threading.Event()

    def wait(message: Message) -> Message:
        release.wait(LIMIT_S)
        return doubled(message)

    _, client = serve(wait)
    with pytest.raises(Unavailable, match="deadline"):
        client.call(push(np.ones(3)), deadline_s=0.2)
    release.set()
    with client.call(push(np.ones(3), 8), deadline_s=LIMIT_S) as answer:
        assert answer.fields == {"round": 8, "staleness": 0}, "a late answer is never taken for another call's"


def test_an_error_of_the_handler_is_an_answer(serve: Serve) -> None:
    def refuse(message: Message) -> Message:
        raise PeerError("no such block")

    _, client = serve(refuse)
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert answer.kind == "refuse"
        assert "no such block" in str(answer.fields["reason"])


def test_a_fault_of_the_handler_is_an_answer_too(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Message) -> Message:
        raise OSError(28, "No space left on device")

    _, client = serve(fail)
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert "OSError: [Errno 28] No space left on device" in str(answer.fields["reason"])
    assert caplog.text.count("Traceback") == 1


def test_a_fault_before_the_answer_is_read_is_an_answer_too(serve: Serve) -> None:
    @contextlib.contextmanager
    def no_reading() -> Iterator[None]:
        raise OSError(28, "No space left on device")
        yield

    _, client = serve(lambda message: Guarded(doubled(message), no_reading()))
    with client.call(push(np.ones(100_000)), deadline_s=LIMIT_S) as answer:
        assert "No space left on device" in str(answer.fields["reason"])


def test_a_handler_that_is_unavailable_breaks_the_connection(serve: Serve) -> None:
    def go(message: Message) -> Message:
        raise Unavailable("the server has ended")

    _, client = serve(go)
    with pytest.raises(Unavailable, match="closed the connection"):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)


_SERVER = """
import sys, time
from penstock.ps.transport.local import LineServer
def hang(message):
    print("asked", flush=True)
    time.sleep(600)
server = LineServer(hang, job="j", token="t")
print(server.address, flush=True)
sys.stdin.read()
"""


def test_a_killed_server_breaks_the_call_at_once_and_cleans_up() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        client = LocalClient(address, job="j", token="t")
        said = server.stdout

        def kill_while_asked() -> None:
            assert said.readline() == "asked\n"
            os.kill(server.pid, signal.SIGKILL)

        killing = threading.Thread(target=kill_while_asked)
        killing.start()
        with pytest.raises(Unavailable, match="closed the connection"):
            client.call(push(np.ones(1_000_000)), deadline_s=LIMIT_S)
        killing.join()
    with pytest.raises(Unavailable, match="no server listens"):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)
    client.close()


def raw(server: LineServer) -> socket.socket:
    """Return a connection that has said hello."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + server.address)
    line = Line(connection)
    line.send(Message("hello", {"job": "j", "token": "t"}), float("inf"))
    line.receive(float("inf"))
    connection.settimeout(LIMIT_S)
    return connection


def test_a_thousand_malformed_frames_change_nothing(serve: Serve) -> None:
    seen: list[Message] = []

    def count(message: Message) -> Message:
        seen.append(message)
        return doubled(message)

    server, client = serve(count)
    rng = random.Random(1)
    for number in range(1000):
        connection = raw(server)
        flags = rng.choice([0, 1, 2, 3, 77])
        prefix = struct.pack(
            "<4sIIQ", rng.choice([b"PSL1", b"xxxx"]), flags, rng.choice([0, 8, 40, 2**31]), 2**40 + number
        )
        connection.sendall(rng.choice([prefix, prefix[:7]]) + rng.randbytes(rng.randrange(60)))
        connection.close()
    assert seen == []
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert values_of(answer).tolist() == [2.0, 2.0, 2.0]


def test_who_has_not_said_hello_is_not_listened_to_for_long(serve: Serve) -> None:
    server, _ = serve()
    head, _ = encode(Message("hello", {"job": "j", "token": "t"}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + server.address)
        connection.settimeout(LIMIT_S)
        connection.sendall(struct.pack("<4sIIQ", b"PSL1", 0, len(head), 1 << 30))
        assert connection.recv(1) == b"", "no byte of the body is waited for"


def test_of_those_who_do_not_say_hello_the_oldest_makes_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ps.transport.local.HELLO_S", 300.0)
    server, client = serve()
    with client.call(push(np.arange(3)), deadline_s=LIMIT_S):
        pass
    num_old = 20
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(num_old + MAX_UNKNOWN):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(LIMIT_S)
            one.connect("\0" + server.address)
            strangers.append(one)
        assert all(one.recv(1) == b"" for one in strangers[:num_old]), "they are let go, long before their time is over"
        with client.call(push(np.arange(3)), deadline_s=LIMIT_S) as answer:
            assert values_of(answer).tolist() == [0, 2, 4], "who has said it is no stranger"
        fresh = LocalClient(server.address, job="j", token="t")
        with fresh.call(push(np.arange(2)), deadline_s=LIMIT_S) as answer:
            assert values_of(answer).tolist() == [0, 2]
        fresh.close()
        assert len(server._unknown) < MAX_UNKNOWN
        for one in strangers[num_old + 1 :]:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)


@pytest.mark.parametrize("sent", [b"xxxx" + bytes(16), b"PSL1", struct.pack("<4sIIQ", b"PSL1", 3, 9, 1)])
@pytest.mark.parametrize("max_body", [0, 100])
def test_memory_that_comes_with_a_broken_frame_is_let_go(sent: bytes, max_body: int) -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    region = make_region(1)
    memory = os.fstat(region.descriptor)
    socket.send_fds(theirs, [sent], [region.descriptor])
    region.close()
    theirs.close()
    with pytest.raises((PeerError, Closed)):
        line.receive(float("inf"), max_body=max_body)
    assert not is_open(memory)
    line.close()


def is_open(file: os.stat_result) -> bool:
    """Return whether this process has a descriptor of a file."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread's, closed meanwhile
            if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), file):
                return True
    return False


def test_descriptors_that_run_out_keep_nobody_away_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")] * 2

    def scarce(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    _, client = serve()
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert values_of(answer).tolist() == [2.0, 2.0, 2.0]


def test_threads_that_run_out_keep_nobody_away_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def scarce(self: threading.Thread) -> None:
        if self.name == "ps-local" and failures:
            raise failures.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    _, client = serve()
    with pytest.raises(Unavailable):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S) as answer:
        assert values_of(answer).tolist() == [2.0, 2.0, 2.0]


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("shrinks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, 4096)
    with pytest.raises(PeerError, match="not sealed against shrinking"):
        receive_region(descriptor)
    region = make_region(1)
    with pytest.raises(PermissionError):
        os.ftruncate(region.descriptor, 0)
    region.close()


def test_closing_a_server_ends_its_threads_and_breaks_its_calls(serve: Serve) -> None:
    server, client = serve()
    with client.call(push(np.ones(3)), deadline_s=LIMIT_S):
        pass
    server.close = lambda: None  # type: ignore[method-assign]  # closed here, not by the fixture
    LineServer.close(server)
    with pytest.raises(Unavailable):
        client.call(push(np.ones(3)), deadline_s=LIMIT_S)
    assert not [t for t in threading.enumerate() if t.name.startswith("ps-local")]
