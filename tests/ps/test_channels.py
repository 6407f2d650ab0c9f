"""Steps over channels: the same as by messages to the bit, whatever breaks, and nothing twice."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import AHEAD, HEIGHTS, OPS, STEP, Start, frame, jobs, pushed, raw_channel, trained
from tests.support.capabilities import absent
from tests.support.waiting import until
from torch import Tensor

from penstock.errors import PenstockError
from penstock.ps.communicator import remotes
from penstock.ps.remote import PsMode
from penstock.ps.server import ParameterServer


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield begin


@pytest.mark.parametrize("mode", ["sync", "async", "half_async"])
@pytest.mark.parametrize("local", [True, False])
def test_channels_train_as_messages_do_to_the_bit(start: Start, mode: PsMode, *, local: bool) -> None:
    expected = trained(start(mode, by_python=True))
    job = start(mode, shared_memory=local)
    assert trained(job) == expected
    assert job.steps == [1, 5], "the first step learns how a step is laid out"
    assert all(link.route.is_local == local for link in job.clients[0].links)
    assert [int(number) > 0 for number in job.ahead] == [not local] * 2, "sent ahead of the last step"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("breaks", ["lost", "given up"])
def test_what_was_sent_ahead_of_a_lost_step_is_applied_once(start: Start, mode: PsMode, breaks: str) -> None:
    expected = trained(start(mode, by_python=True))
    job = start(mode, shared_memory=False)

    def fail() -> None:
        if job.steps[1] != 3:
            return
        if breaks == "lost":
            job.clients[0]._session.disarm(1)
        else:  # as if an operator of another step had failed after it
            job.ahead = [OPS.send_ahead([torch.ones(2, 4)], job.remotes[0], ["w.block1"], [1])]

    job.after_ahead = fail
    assert trained(job) == expected
    assert job.steps == [2, 5], "Python made the step, and the next one went over channels again"


def test_what_was_sent_ahead_of_no_step_is_not_pushed(start: Start) -> None:
    expected = start("sync", by_python=True)
    expected.step(0)
    job = start("sync", shared_memory=False)
    job.step(0)
    assert int(OPS.send_ahead([torch.full((3, 4), 9.0)], job.remotes[0], ["w.block0"], [0])) > 0
    for each in (expected, job):
        each.step(1)
    assert job.everything() == expected.everything()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("local", [True, False])
def test_gradients_in_pieces_are_pushed_as_if_joined(start: Start, mode: PsMode, *, local: bool) -> None:
    found = []
    for in_pieces in (False, True):
        job = start(mode, shared_memory=local)
        for seed in range(4):
            pushed(job, seed, in_pieces=in_pieces)
        assert job.steps[0] == 1, "steps that Python made"
        found.append(job.everything())
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("local", [True, False])
def test_gradients_of_sums_are_pushed_without_python(start: Start, mode: PsMode, *, local: bool) -> None:
    found = []
    for by_python in (True, False):
        job = start(mode, shared_memory=local, by_python=by_python)
        for seed in range(4):
            one = torch.tensor(float(seed))  # with strides of 0
            dense, values = [one.expand(3, 4), one.expand(2, 4)], [one.expand(3, 2), torch.ones(2, 1).expand(2, 2)]
            rows = [torch.tensor([0, 8, 0]), torch.tensor([[7, 0], [9, 0]])[:, 0]]
            sent = OPS.send_step(dense, rows, values, [], job.remotes[0], job.spec)
            OPS.recv_step([torch.empty(3, 4)], [sent], job.remotes[0], ["w"], ["w.block0"], [0])
        found.append(job.everything())
        assert job.steps[0] == (4 if by_python else 1)
    assert found[0] == found[1]


@pytest.mark.parametrize("local", [True, False])
def test_padded_ids_are_looked_up_without_python(start: Start, monkeypatch: pytest.MonkeyPatch, *, local: bool) -> None:
    job = start("async", shared_memory=local)
    trained(job, 2)
    monkeypatch.setattr(job.clients[0], "prefetch", None)
    tables = [("t", ["t.block0", "t.block1"], [0, 1], HEIGHTS), ("ids", ["ids"], [0, 1], [])]
    for table in tables:
        ids = torch.tensor([[3, 8, 3], [0, 5, 8]])
        whole = OPS.prefetch(ids, job.remotes[0], *table, 2, torch.float32, None)
        for padding in (3, 8, 5, 7):
            found = OPS.prefetch(ids, job.remotes[0], *table, 2, torch.float32, padding)
            assert torch.equal(found, whole.masked_fill((ids == padding).unsqueeze(-1), 0.0))
        only = torch.full((2, 2), 8)
        assert torch.equal(OPS.prefetch(only, job.remotes[0], *table, 2, torch.float32, 8), torch.zeros(2, 2, 2))


def test_without_sealed_memory_bodies_go_through_the_socket(start: Start) -> None:
    expected = trained(start("sync", by_python=True))
    with absent("memfd"):
        job = start("sync")
        assert trained(job) == expected
    assert job.steps == [1, 5]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async", "half_async"])
def test_an_answer_that_is_lost_has_its_step_applied_once(start: Start, mode: PsMode, *, local: bool) -> None:
    expected = trained(start(mode, by_python=True))
    job = start(mode, shared_memory=local)
    apply, breaks = job.storages[1].update_all, [3]

    def applied(gradients: Any) -> None:
        apply(gradients)
        if breaks and job.steps[1] == breaks[0]:
            breaks.pop()
            job.clients[0]._session.disarm(1)  # breaks the connection while the trainer waits for its answer

    job.storages[1].update_all = applied  # type: ignore[method-assign]
    assert trained(job) == expected
    assert not breaks
    assert job.steps == [2, 5], "Python repeated the step, and the next one went over channels again"


def test_threads_that_are_announced_stay_on_the_channels(start: Start) -> None:
    job = start("half_async")
    half: Any = remotes.get(job.remotes[0])
    by_python = []
    for seed, num_threads in enumerate([1, 1, 2, 1, 1]):
        half.set_participants(num_threads)
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(job.step, [seed] * num_threads))
        by_python.append(job.steps[0])
    assert by_python == [1, 1, 1, 1, 1], "the first; two threads push the means of all variables at once"
    assert [job.storages[i].steps[f"w.block{i}"] for i in range(2)] == [5, 5]


def holds_a_trainer_up(server: ParameterServer) -> bool:
    with server._dispatcher.frozen():
        return bool(server._dispatcher.machine.waits_for())


def test_a_channel_that_breaks_at_the_barrier_loses_nothing(start: Start) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start("sync", trainers=2, by_python=by_python)
        opening = [threading.Thread(target=remotes.get, args=(remote,)) for remote in job.remotes]
        for thread in opening:
            thread.start()
        for thread in opening:
            thread.join()
        for seed in range(4):
            waits = threading.Thread(target=job.step, args=(10 + seed, 1))
            waits.start()
            for server in job.servers:
                until(partial(holds_a_trainer_up, server), "it has reached both barriers")
            if not by_python and seed == 2:
                next(c for c in job.clients if c.descriptor.trainer == 1)._session.disarm(0)
            job.step(seed, 0)
            waits.join()
        outcomes.append(job.everything())
    assert outcomes[0] == outcomes[1]


def test_lookups_at_once_get_their_own_rows(start: Start) -> None:
    """Answers of this size lie in memory that the next request's answer takes."""
    job = start("sync")
    job.step(0)
    blocks = {"t.block0": (4, 2), "w.block0": (3, 4)}  # of one server
    rows = {block: torch.arange(height).repeat(20_000) for block, (height, _) in blocks.items()}

    def ask(block: str) -> Tensor:
        height, width = blocks[block]
        found: Tensor = OPS.prefetch(
            rows[block], job.remotes[0], block, [block], [0], [height], width, torch.float32, None
        )
        return found

    expected = {block: ask(block) for block in blocks}
    assert job.clients[0]._session.is_armed
    with ThreadPoolExecutor(4) as pool:
        for asked in [[*blocks, *blocks]] * 25:
            for block, found in zip(asked, pool.map(ask, asked), strict=True):
                assert torch.equal(found, expected[block]), block


def test_a_row_that_is_not_there_is_an_error_with_its_name(start: Start) -> None:
    job = start("sync")
    before = trained(job)[1]
    of_table = (["t.block0", "t.block1"], [0, 1], HEIGHTS, 2, torch.float32, None)
    with pytest.raises(PenstockError, match="id 9 is no row of the table 't', which has 9"):
        OPS.prefetch(torch.tensor([1, 9]), job.remotes[0], "t", *of_table)
    assert job.everything() == before
    job.step(7)


@pytest.mark.parametrize("local", [True, False])
def test_what_goes_over_channels_is_counted_on_both_sides(start: Start, *, local: bool) -> None:
    counted = []
    for by_python in (True, False):
        job = start("sync", by_python=by_python, shared_memory=local)
        trained(job)
        rows = [job.clients[0].counters.rows(), *(server.counters.rows() for server in job.servers)]
        ends = {endpoint: str(i) for i, endpoint in enumerate(job.endpoints)}
        counted.append(
            {
                (side, ends.get(peer, peer), block): (row.sent_bytes, row.received_bytes, row.merges)
                for side, found in enumerate(rows)
                for (peer, block), row in found.items()
                if block
            }
        )
    assert counted[0] == counted[1]


def test_malformed_messages_of_channels_change_nothing(start: Start) -> None:
    job = start("sync")
    before, chance = trained(job)[1], random.Random(3)
    kinds = [struct.pack("<HHHHqqqqQ", kind, 1, 0, 0, 0, 1, 5, 0, 16) for kind in (1, 2, 3)]
    part = struct.pack("<QIBbBBq", 0, 0, 0, 6, 1, 0, 4)
    for _ in range(300):
        torn = bytearray(chance.choice(kinds) + part)
        for _ in range(chance.randrange(1, 4)):
            torn[chance.randrange(len(torn))] = chance.randrange(256)
        torn = torn[: chance.randrange(len(torn))] if chance.random() < 0.3 else torn
        magic, flags = chance.choice([b"PSC2", b"PSC2", b"xxxx"]), chance.choice([0, 0, 1, 2, 3])
        length = chance.choice([16, 16, 16, 0, 2**40])
        with raw_channel(job) as connection:
            connection.settimeout(60)
            connection.sendall(struct.pack("<4sIIIQ", magic, flags, len(torn), 0, length) + bytes(torn) + bytes(16))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        assert not answer or answer[24:26] == struct.pack("<H", 17), "refused, or hung up on"
    assert job.everything() == before
    assert not any(len(server._state.payloads) for server in job.servers)
    job.step(7)


DENSE, ROWS = (0, 0, [3, 4]), (1, 1, [2])


@pytest.mark.parametrize(
    "messages",
    [
        [frame(AHEAD, [DENSE]), frame(AHEAD, [DENSE]), frame(STEP, number=2)],
        [frame(AHEAD, [DENSE]), frame(STEP, [DENSE], number=1)],
        [frame(AHEAD, [DENSE]), frame(STEP)],
        [frame(AHEAD, [DENSE]), frame(STEP, number=1, trainer=1)],
        [frame(AHEAD, [ROWS, (1, 0, [2, 2])]), frame(STEP, number=1)],
        [frame(AHEAD, [(0, 0, [2, 4])]), frame(STEP, number=1)],
        [frame(AHEAD, [(9, 0, [3, 4])]), frame(STEP, number=1)],
        [frame(AHEAD), frame(STEP, number=1)],
    ],
    ids=["twice", "in the step too", "not in its number", "another trainer", "rows", "sizes", "no block", "nothing"],
)
def test_what_may_not_be_ahead_of_a_step_is_refused(start: Start, messages: list[bytes]) -> None:
    job = start("sync")
    job.step(0)
    before = job.everything()
    with raw_channel(job) as connection:
        connection.settimeout(10)
        connection.sendall(b"".join(messages))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 16):
                answer += piece
    assert not answer or answer[24:26] == struct.pack("<H", 17), "refused, or hung up on"
    assert job.everything() == before
    assert not len(job.servers[0]._state.payloads)
    job.step(7)
