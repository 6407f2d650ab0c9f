"""Channels when something goes wrong: threads out of order, lost answers, messages that have no encoding."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import OPS, STEP, Job, Start, frame, jobs, pushed, raw_channel, trained
from tests.ps.torch_storage import TorchStorage
from tests.support.waiting import until
from torch import Tensor

from penstock.errors import PeerError, Unavailable
from penstock.native.channels import Answers, Block, Session, Traffic, close_session, know_layout, open_session
from penstock.ps.communicator import remotes
from penstock.ps.transport.local import keep_alive

LIMIT_S = 30  # of a thread that would wait for ever


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield begin


def lose_an_answer(job: Job, server: int, at_update: int) -> list[int]:
    """Break the connection while the trainer waits for its answer; return what is emptied when that has happened."""
    apply, left = job.storages[server].update_all, list(range(at_update))

    def applied(gradients: Any) -> None:
        apply(gradients)
        if left and left.pop() == 0:
            job.clients[0]._session.disarm(server)

    job.storages[server].update_all = applied  # type: ignore[method-assign]
    return left


def on_a_thread(call: Callable[[], object]) -> None:
    """Run it on a thread of its own; fail if it hangs there, or raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


# ---------------------------------------------------------------- repeated steps


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("local", [True, False])
def test_rows_of_one_server_are_applied_once_after_a_loss(start: Start, mode: Any, *, local: bool) -> None:
    found = []
    for by_python in (True, False):
        job = start(mode, by_python=by_python, shared_memory=local)
        left = [] if by_python else lose_an_answer(job, 0, at_update=3)
        for seed in range(4):
            pushed(job, seed, in_pieces=False)
        assert not left
        found.append(job.everything())
    assert found[0] == found[1]


def test_a_step_that_is_never_repeated_lets_other_threads_step(start: Start) -> None:
    job = start("async")
    trained(job, 2)
    left, send_step = lose_an_answer(job, 1, at_update=2), job.clients[0].send_step

    def fail(pushes: Any) -> None:
        job.clients[0].send_step = send_step  # type: ignore[method-assign]
        raise MemoryError("no room for the gradients")

    job.step(2)
    job.clients[0].send_step = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        job.step(3)
    assert not left
    on_a_thread(lambda: job.step(4))
    assert job.steps == [2, 5], "Python made the last step, since there was no channel"


def test_a_remote_that_is_closed_during_a_step_stays_closed(start: Start) -> None:
    job = start("async")
    trained(job, 2)
    apply, session = job.storages[1].update_all, job.clients[0]._session

    def applied(gradients: Any) -> None:
        apply(gradients)
        remotes.close(job.remotes[0])

    job.storages[1].update_all = applied  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="was closed by another thread during a step"):
        job.step(2)
    assert not remotes.opened()
    assert len(job.clients) == 1
    job.storages[1].update_all = apply  # type: ignore[method-assign]

    def push() -> None:
        session.begin_push()
        session.end_push()

    on_a_thread(push)


# ---------------------------------------------------------------- threads


def test_the_round_of_a_session_never_goes_back(start: Start) -> None:
    job = start("sync")
    trained(job, 3)
    of_server: Any = job.clients[0].links[0]._round
    tell, may_tell, waits = of_server._tell, threading.Event(), threading.Event()

    def late(number: int) -> None:
        waits.set()
        assert may_tell.wait(LIMIT_S)
        tell(number)

    of_server._tell = late
    ids = torch.tensor([1, 8, 0, 8])[::2]  # in strides: a lookup of Python's
    of_table = (["t.block0", "t.block1"], [0, 1], [4, 5], 2, torch.float32, None)
    look_up = threading.Thread(target=lambda: OPS.prefetch(ids, job.remotes[0], "t", *of_table))
    look_up.start()
    assert waits.wait(LIMIT_S)
    pushed(job, 0, in_pieces=False)
    of_server._tell = tell
    may_tell.set()
    look_up.join()
    rounds = [storage.rounds for storage in job.storages]
    pushed(job, 1, in_pieces=False)
    assert [storage.rounds for storage in job.storages] == [number + 1 for number in rounds]
    assert job.clients[0]._session.round(0) == rounds[0] + 1


@pytest.mark.parametrize("sparse", [False, True])
def test_a_push_beside_a_step_is_not_overtaken_by_it(start: Start, *, sparse: bool) -> None:
    job = start("async")
    trained(job, 2)
    link: Any = job.clients[0].links[0]
    exchange, has_begun, steps = link._exchange, threading.Event(), []

    def slow(message: Any, deadline_s: float) -> Any:
        if message.kind == "push" and not has_begun.is_set():
            has_begun.set()
            stepping.join(0.2)  # with the step behind the push it waits in vain
        return exchange(message, deadline_s)

    def step() -> None:
        assert has_begun.wait(LIMIT_S)
        steps.append(job.step(7))

    link._exchange = slow
    stepping = threading.Thread(target=step)
    stepping.start()
    before = dict(job.storages[0].steps)
    if sparse:
        OPS.send_rows(torch.tensor([1, 1]), torch.ones(2, 2), job.remotes[0], "t", ["t.block0"], [0], [4])
    else:
        OPS.send([torch.ones(3, 4)], job.remotes[0], "w", ["w.block0"], [0])
    stepping.join()
    assert steps
    block = "t.block0" if sparse else "w.block0"
    assert job.storages[0].steps[block] - before[block] == 2, "updates: of the push and of the step"


def test_lookups_of_several_threads_are_all_counted(start: Start) -> None:
    job = start("sync")
    job.step(0)
    ids, num = torch.tensor([0, 1, 2]), 300

    def look_up(_: int) -> None:
        OPS.prefetch(ids, job.remotes[0], "t", ["t.block0"], [0], [4], 2, torch.float32, None)

    look_up(0)
    counted = {row["calls"] for name, row in job.clients[0]._session.sums(0) if name == "t.block0"}
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(look_up, range(num)))
    after = {row["calls"] for name, row in job.clients[0]._session.sums(0) if name == "t.block0"}
    assert after == {calls + num for calls in counted}


# ---------------------------------------------------------------- messages


def parts_of(body: bytes, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Cut a body into float32 tensors of these shapes, each at a multiple of 64."""
    at = 0
    for tensor in tensors:
        at = -(-at // 64) * 64
        yield torch.frombuffer(bytearray(body[at:]), dtype=torch.float32, count=tensor.numel()).reshape(tensor.shape)
        at += 4 * tensor.numel()


def test_values_in_other_strides_are_answered_as_they_are() -> None:
    size = 256  # of matrices whose copies are given back to the system at once
    values = [torch.full((size, size), float(i)).add(torch.arange(float(size))).t() for i in range(4)]
    ours, theirs = socket.socketpair()
    block = Block("w", torch.float32, [size, size], is_table=False)
    answers = Answers(ours.detach(), Traffic([block]), shares=False)
    answers.stage([0] * len(values), values)
    with theirs, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(answers.answer, 0, 0, time.monotonic() + LIMIT_S)
        prefix = theirs.recv(24, socket.MSG_WAITALL)
        _, _, head, _, body = struct.unpack("<4sIIIQ", prefix)
        assert len(theirs.recv(head, socket.MSG_WAITALL)) == head
        found = theirs.recv(body, socket.MSG_WAITALL)
        sent.result()
    for value, answered in zip(values, parts_of(found, values), strict=True):
        assert torch.equal(answered, value)


@pytest.mark.parametrize("reads", [[0, 0], [0] * 65535])
def test_a_step_that_reads_a_block_twice_is_refused(start: Start, reads: list[int]) -> None:
    job = start("async")
    job.step(0)
    before = job.everything()
    with raw_channel(job) as connection:
        connection.settimeout(LIMIT_S)
        connection.sendall(frame(STEP, reads=reads))
        answer = connection.recv(1 << 16)
    assert answer[24:26] == struct.pack("<H", 17)
    assert b"reads 'w.block0' twice" in answer
    assert job.everything() == before


def test_a_program_may_pull_a_block_twice(start: Start) -> None:
    job = start("async")
    for seed in range(3):
        job.step(seed)
        once, twice = torch.empty(3, 4), [torch.empty(3, 4), torch.empty(3, 4)]
        sent = OPS.send_step([torch.ones(3, 4), torch.ones(2, 4)], [], [], [], job.remotes[0], only_dense(job))
        OPS.recv_step(twice, [sent], job.remotes[0], ["w", "w"], ["w.block0", "w.block0"], [0, 0])
        OPS.recv([once], [sent], job.remotes[0], "w", ["w.block0"], [0])
        assert torch.equal(twice[0], once)
        assert torch.equal(twice[1], once)
    assert job.steps[0] == 2, "steps that Python made: the first of each layout"


def only_dense(job: Job) -> str:
    return json.dumps({"dense": json.loads(job.spec)["dense"], "sparse": []})


def test_the_first_malformed_message_is_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    job = start("async")
    job.step(0)
    for _ in range(2):
        with raw_channel(job) as connection:
            connection.settimeout(LIMIT_S)
            connection.sendall(frame(STEP, [(0, 0, [1] * 9)]))
            assert connection.recv(1) == b"", "hung up on"
    (record,) = [r for r in caplog.records if "malformed" in r.message]
    assert record.levelno == logging.WARNING
    assert "a tensor of a message is misdescribed" in record.message


# ---------------------------------------------------------------- steps that have no encoding


def not_encoded(names: list[str], values: list[Tensor]) -> tuple[Session, list[str]]:
    """Push values by an operator to a session that nobody answers; return it, and why it has left that to Python."""
    ends = [socket.socketpair() for _ in range(3)]
    session, remote = Session(0, 1, sync=False, limit_s=1.0, lease_s=20.0, num_servers=1), "async 0/1 nowhere:1"
    session.arm(0, [ours.detach() for ours, _ in ends], names, 0, shares=False, local=True)
    spec = f"{len(names)} gradients of {values[0].dim()} dimensions"
    know_layout(spec, [(names, [0] * len(names), [])], [])
    open_session(remote, session)
    try:
        with pytest.raises(json.JSONDecodeError):  # Python has to do it, from no description
            OPS.send_step(values, [], [], [], remote, spec)
    finally:
        close_session(remote, session)
        for _, theirs in ends:
            theirs.close()
    return session, [session.take_why(), session.take_why()]


@pytest.mark.parametrize(
    ("names", "value", "why"),
    [
        (["w"], torch.ones([1] * 9), "a tensor has 9 dimensions, of at most 8"),
        ([f"w{i}" for i in range(65536)], torch.ones(1), "a message has 65536 tensors and reads 0 blocks, of at most"),
    ],
    ids=["dimensions", "tensors"],
)
def test_what_has_no_encoding_is_not_sent(names: list[str], value: Tensor, why: str) -> None:
    session, whys = not_encoded(names, [value] * len(names))
    assert why in whys[0]
    assert whys[1] == "", "it is said once"
    assert session.is_armed, "the channels are as good as before"


@pytest.mark.parametrize("local", [True, False])
def test_a_step_without_encoding_keeps_the_channels(
    start: Start, caplog: pytest.LogCaptureFixture, *, local: bool
) -> None:
    shape = [1] * 8 + [3]
    stored = [TorchStorage({f"w.block{i}": tuple(shape)}, sync=False) for i in range(2)]
    job, values = start("async", shared_memory=local, stored=stored), [torch.ones(shape), torch.ones(shape)]
    for _ in range(3):
        ahead = [OPS.send_ahead(values, job.remotes[0], ["w.block0", "w.block1"], [0, 1])]
        with pytest.raises(PeerError, match="up to 8 dimensions: reshape it"):
            OPS.send_step(values, [], [], ahead, job.remotes[0], only_dense(job))
    assert job.steps[0] == 3
    assert job.clients[0]._session.is_armed
    assert [int(of) for of in ahead] == [0], "nothing is sent ahead of such a step"
    (record,) = [r for r in caplog.records if "go through gRPC" in r.message]
    assert "a tensor has 9 dimensions, of at most 8" in record.message


# ---------------------------------------------------------------- connections


def alive_within_s(connection: socket.socket) -> list[float]:
    """Return after how long a silent connection breaks: one that waits, and one whose bytes are not acknowledged."""
    idle, every, count, unsent_ms = (
        connection.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    )
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    return [idle + every * count, unsent_ms / 1000]


def test_both_ends_of_a_channel_break_within_20_s_of_silence(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[socket.socket] = []

    def noted(connection: socket.socket) -> None:
        keep_alive(connection)
        accepted.append(connection.dup())

    monkeypatch.setattr("penstock.ps.transport.local.keep_alive", noted)
    job = start("async", shared_memory=False)
    remotes.get(job.remotes[0])
    link = job.clients[0].links[0]
    descriptor, _ = link.route.open_channel(link._message("channel"), deadline_s=LIMIT_S)
    until(lambda: accepted, "the server has accepted the connection")
    assert isinstance(descriptor, int)
    with socket.socket(fileno=descriptor) as ours, accepted[0] as theirs:
        assert alive_within_s(ours) == [20, 20]
        assert alive_within_s(theirs) == [20, 20]
    for other in accepted[1:]:
        other.close()
