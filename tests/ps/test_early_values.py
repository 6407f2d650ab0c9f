"""Values sent before their round is applied: the same bits as without, and no trace of a round that came otherwise."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import AHEAD, OPS, STEP, Job, Start, frame, jobs, raw_channel
from tests.ps.staged_storage import stored, taken
from tests.support.waiting import until

from penstock.errors import PenstockError
from penstock.ps.communicator import remotes
from penstock.ps.durability.wal import AppliedIndex
from penstock.ps.early import complete
from penstock.ps.persistence import recover_server
from penstock.ps.rounds.machine import Membership
from penstock.ps.rounds.messages import Join, Leave, Step, TrainerIncarnation
from penstock.ps.rounds.sync import SyncRounds
from penstock.ps.storage import Gradient


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:

        def begun(**settings: Any) -> Job:
            job = begin("sync", trainers=2, stored=stored("sync"), shared_memory=False, **settings)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(remotes.get, job.remotes))
            return job

        yield begun


Finish = Callable[[], list[Any]]


def begin(job: Job, seed: int, trainer: int) -> Finish:
    """Send a step's dense gradients ahead; return what does the rest, and returns what is read then."""
    random, remote = torch.Generator().manual_seed(2 * seed + trainer), job.remotes[trainer]
    dense = [torch.randn(3, 4, generator=random), torch.randn(2, 4, generator=random)]
    rows, ids = torch.randint(0, 9, (6,), generator=random), torch.randint(-5, 40, (7,), generator=random)
    values = [torch.randn(6, 2, generator=random), torch.randn(7, 2, generator=random)]
    ahead = [OPS.send_ahead(dense[at : at + 1], remote, [f"w.block{at}"], [at]) for at in (0, 1)]

    def finish() -> list[Any]:
        sent = OPS.send_step(dense, [rows, ids], values, ahead, remote, job.spec)
        out = [torch.empty(3, 4), torch.empty(2, 4)]
        OPS.recv_step(out, [sent], remote, ["w", "w"], ["w.block0", "w.block1"], [0, 1])
        return [t.tolist() for t in out]

    return finish


def finished(steps: list[Finish]) -> list[list[Any]]:
    with ThreadPoolExecutor(2) as pool:
        return [one.result() for one in [pool.submit(step) for step in steps]]


def both(job: Job, seed: int) -> list[list[Any]]:
    return finished([begin(job, seed, trainer) for trainer in (0, 1)])


def staged_by(job: Job, steps: list[Finish]) -> bool:
    """Whether the blocks of these steps are staged, in a round that is not applied."""
    return bool(steps) and all(server._state.staging._blocks for server in job.servers)


def test_early_values_are_those_of_the_round_to_the_bit(start: Start) -> None:
    seen, found = [], []
    for by_python in (True, False):
        job = start(by_python=by_python)
        seen.append([both(job, seed) for seed in range(4)])
        found.append(job.everything())
    assert seen[0] == seen[1]
    assert found[0] == found[1]
    assert taken(job) == [["w.block0"] * 3, ["w.block1"] * 3], "all but the first step, which knows not what it reads"


def test_a_staged_block_is_seen_by_nobody_before_its_round(start: Start) -> None:
    job = start()
    both(job, 0)
    before, sent = job.everything(), [[row["sent_bytes"] for *_, row in traffic(job, i)] for i in range(2)]
    steps = [begin(job, 1, trainer) for trainer in (0, 1)]
    until(lambda: staged_by(job, steps), "all parts are there")
    until(lambda: [[r["sent_bytes"] for *_, r in traffic(job, i)] for i in range(2)] != sent, "values are sent")
    assert job.everything() == before
    assert finished(steps)[0] == [storage.values[f"w.block{i}"].tolist() for i, storage in enumerate(job.storages)]


def traffic(job: Job, server: int) -> list[tuple[int, int, dict[str, int]]]:
    found: Any = job.servers[server]._transports[1]
    return list(found._channels.traffic.sums())


def otherwise(job: Job, how: str) -> list[list[Any]]:
    """Let a round be applied otherwise than it was staged; return what is read then."""
    steps = [begin(job, 1, trainer) for trainer in (0, 1)]
    if not job.by_python:
        until(lambda: staged_by(job, steps), "all parts are there")
    if how == "a trainer leaves":
        remotes.close(job.remotes[1])
        return finished(steps[:1])
    if how == "a connection breaks" and not job.by_python:
        next(c for c in job.clients if c.descriptor.trainer == 1)._session.disarm(0)
    if how == "other gradients":
        return both(job, 2)
    return finished(steps)


@pytest.mark.parametrize("how", ["a trainer leaves", "a connection breaks", "other gradients"])
def test_what_was_staged_of_another_round_is_dropped(start: Start, how: str) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start(by_python=by_python)
        both(job, 0)
        read = otherwise(job, how)
        if how != "a trainer leaves":
            both(job, 3)
        outcomes.append((read, job.everything()))
        assert not any(server._state.staging._blocks for server in job.servers)
    assert outcomes[0] == outcomes[1]
    assert all("w.block0" not in blocks[:-1] for blocks in taken(job)), "only the last round was as it was staged"


def test_a_round_that_fails_drops_what_was_staged(start: Start) -> None:
    job = start()
    both(job, 0)
    before = job.everything()
    for storage in job.storages:
        storage.capacity["ids"] = 0
    steps = [begin(job, 1, trainer) for trainer in (0, 1)]
    until(lambda: staged_by(job, steps), "all parts are there")
    with pytest.raises(PenstockError, match="table 'ids' is full"):
        finished(steps)
    assert job.everything() == before
    assert taken(job) == [[], []]


def test_staged_rounds_are_in_the_log(start: Start, tmp_path: Path) -> None:
    job = start(state_dir=tmp_path)
    for seed in range(3):
        both(job, seed)
    assert all(taken(job))
    again = stored("sync")
    for server, storage in zip(job.servers, again, strict=True):
        folder = server.settings.folder
        assert folder is not None
        applied = AppliedIndex(trainers=2, keeps_changes=False)
        recover_server(folder, storage, applied, job="local", blocks=list(storage.blocks()))
        assert applied.round == 3
    job.storages, expected = again, job.everything()
    assert job.everything() == expected


TABLE, DENSE = 2, (0, 0, [3, 4])


@pytest.mark.parametrize("reads", [[TABLE], [9], [0, 0]], ids=["a table", "no block", "twice"])
def test_what_may_not_be_read_is_not_sent_early(start: Start, reads: list[int]) -> None:
    job = start()
    with raw_channel(job) as connection:
        connection.settimeout(10)
        connection.sendall(frame(AHEAD, [DENSE], reads=reads) + frame(STEP, number=1))
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert not connection.recv(1 << 16), "hung up on"


def test_a_block_is_complete_with_the_part_of_each_trainer() -> None:
    a, b, c = (Gradient(torch.tensor([float(i)]), None, 0) for i in range(3))
    assert complete([{"x": a, "y": b}, {"x": c}], ["x", "y"]) == {"x": (a, c)}
    assert complete([{"x": a}], []) == {}


def test_a_round_expects_those_that_it_waits_for() -> None:
    machine = SyncRounds(Membership(expected=2, lease_s=10))
    trainers = [TrainerIncarnation(trainer, 1) for trainer in range(2)]
    machine.handle(Join(0, trainers[0]), 0)
    assert machine.expected(0) == (), "not all have joined"
    machine.handle(Join(1, trainers[1]), 0)
    assert (machine.expected(0), machine.expected(1)) == ((0, 1), ())
    machine.handle(Step(2, trainers[0], 0, {}), 0)
    assert machine.expected(0) == (0, 1)
    machine.handle(Leave(3, trainers[1]), 0)
    assert machine.expected(0) == (), "it is being applied"
