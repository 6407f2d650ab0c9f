"""Values sent before their push is applied, without rounds: a trainer's own updates are in them, and nothing twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import OPS, Job, Start, jobs, trained
from tests.ps.staged_storage import StagedStorage, stored, taken
from tests.support.waiting import until

from penstock.errors import PenstockError
from penstock.ps.communicator import remotes
from penstock.ps.durability.wal import AppliedIndex
from penstock.ps.persistence import recover_server
from penstock.ps.remote import PsMode

EARLY_OF_SERVER = [["w.block0"] * 4, ["w.block1"] * 4]
"""What five steps take of what was staged: all but the first, which knows not what it reads."""


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:

        def begun(mode: PsMode = "async", *, trainers: int = 1, large: Any = None, **settings: Any) -> Job:
            job = begin(mode, trainers=trainers, stored=large or stored(mode), shared_memory=False, **settings)
            with ThreadPoolExecutor(trainers) as pool:
                list(pool.map(remotes.get, job.remotes))
            return job

        yield begun


def staged(job: Job) -> list[set[str]]:
    """Return the blocks of which a push is staged, by server."""
    return [set(server._state.staged_pushes._gradients) for server in job.servers]


def sent_ahead(job: Job, trainer: int, fill: float) -> Callable[[], list[Any]]:
    """Send dense gradients ahead, and wait until they are staged. Return what does the rest: what is then read."""
    remote, dense = job.remotes[trainer], [torch.full((3, 4), fill), torch.full((2, 4), 2 * fill)]
    before = [storage.staged.copy() for storage in job.storages]  # type: ignore[attr-defined]  # `stored`
    ahead = [OPS.send_ahead(dense[at : at + 1], remote, [f"w.block{at}"], [at]) for at in (0, 1)]

    def are_staged() -> bool:
        now = [storage.staged for storage in job.storages]  # type: ignore[attr-defined]  # `stored`
        return all(now[i].get(f"w.block{i}") is not of.get(f"w.block{i}") for i, of in enumerate(before))

    if not job.by_python:
        until(are_staged, "the gradients are staged")

    def finish() -> list[Any]:
        rows, ids = torch.tensor([1, 7, 1]), torch.tensor([3, -2])
        values = [torch.full((3, 2), fill), torch.full((2, 2), fill)]
        sent = OPS.send_step(dense, [rows, ids], values, ahead, remote, job.spec)
        out = [torch.empty(3, 4), torch.empty(2, 4)]
        OPS.recv_step(out, [sent], remote, ["w", "w"], ["w.block0", "w.block1"], [0, 1])
        return [t.tolist() for t in out]

    return finish


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_a_trainer_alone_reads_its_own_updates_to_the_bit(start: Start, mode: PsMode) -> None:
    expected = trained(start(mode, by_python=True))
    job = start(mode)
    assert trained(job) == expected
    assert taken(job) == EARLY_OF_SERVER
    assert staged(job) == [set(), set()]


def test_a_staged_push_is_seen_by_nobody_before_its_step(start: Start) -> None:
    job = start()
    job.step(0)
    before = job.everything()
    finish = sent_ahead(job, 0, 1.0)
    assert job.everything() == before
    assert staged(job) == [{"w.block0"}, {"w.block1"}]
    read = finish()
    assert read == [storage.values[f"w.block{i}"].tolist() for i, storage in enumerate(job.storages)]


def test_pushes_of_others_meanwhile_make_the_next_push_stale(start: Start) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start(trainers=2, by_python=by_python)
        for trainer in (0, 1):
            job.step(trainer, trainer)
        alone = job.everything()
        first = sent_ahead(job, 0, 1.0)
        sent_ahead(job, 1, 3.0)()
        read = first()
        states = job.everything()
        staleness = [dict(server.staleness) for server in job.servers]
        sent_ahead(job, 0, 1.0)()
        newly = [
            sum(n * count for n, count in server.staleness.items()) - sum(n * count for n, count in before.items())
            for server, before in zip(job.servers, staleness, strict=True)
        ]
        outcomes.append((states, job.everything()))
    assert outcomes[0] == outcomes[1], "the servers apply both pushes, in the order of the steps"
    assert taken(job)[0][-2:] == ["w.block0"] * 2, "of the other trainer's step, and of the last one"
    speed = torch.tensor(alone[0]["w.block0"][1]) * 0.5 + 1.0
    mine = torch.tensor(alone[0]["w.block0"][0]) - speed * (0.1 / 4)
    assert torch.equal(torch.tensor(read[0]), mine), "its own update, without the other's"
    assert newly == [1, 1], "of the dense blocks, which were read before the other's push"


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_trainers_in_step_one_takes_its_staged_update(start: Start, first: int) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start(trainers=2, by_python=by_python)
        for trainer in (0, 1):
            job.step(trainer, trainer)
        before = [len(blocks) for blocks in taken(job)]
        finish = [sent_ahead(job, trainer, 1.0 + trainer) for trainer in (0, 1)]
        for trainer in (first, 1 - first):
            finish[trainer]()
        outcomes.append(job.everything())
    assert outcomes[0] == outcomes[1]
    now = [blocks[num:] for blocks, num in zip(taken(job), before, strict=True)]
    assert now == [["w.block0"], ["w.block1"]], "of the one that came first; the other is computed on its result"


def test_overlapping_pushes_are_computed_thrice_applied_once(start: Start) -> None:
    """Both are staged on the same value; the step that comes second is computed anew on the result of the first."""
    job = start(trainers=2)
    for trainer in (0, 1):
        job.step(trainer, trainer)
    storage, computed = job.storages[0], Counter[str]()
    stage, applied = storage.stage, storage.steps["w.block0"]  # type: ignore[attr-defined]  # `stored`

    def staged_once_more(block: str, gradient: Any, slot: int = 0) -> Any:
        computed[f"{block} ahead"] += 1
        return stage(block, gradient, slot)

    storage.stage = staged_once_more  # type: ignore[attr-defined]
    storage.before = lambda block: computed.update([block])
    version = job.servers[0]._dispatcher.version("w.block0")
    finish = [sent_ahead(job, trainer, 1.0 + trainer) for trainer in (0, 1)]
    for end in finish:
        end()
    assert (computed["w.block0 ahead"], computed["w.block0"]) == (2, 1)
    assert storage.steps["w.block0"] - applied == 2
    assert job.servers[0]._dispatcher.version("w.block0") - version == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_large_gradients_of_a_step_leave_one_after_the_other(start: Start, mode: PsMode) -> None:
    names = ["a", "b", "c"]
    spec = json.dumps({"dense": [[name, [name], [0], 1] for name in names], "sparse": []})
    outcomes = []
    for by_python in (True, False):
        large: list[Any] = [StagedStorage(dict.fromkeys(names, (300, 300)), sync=mode == "sync"), stored(mode)[1]]
        job = start(mode, by_python=by_python, large=large)
        for seed in range(3):
            random = torch.Generator().manual_seed(seed)
            gradients = [torch.randn(300, 300, generator=random) for _ in names]
            sent = OPS.send_step(gradients, [], [], [], job.remotes[0], spec)
            out = [torch.empty(300, 300) for _ in names]
            OPS.recv_step(out, [sent], job.remotes[0], names, names, [0] * 3)
            assert all(torch.equal(t, large[0].values[name]) for t, name in zip(out, names, strict=True))
        outcomes.append([large[0].values[name].tolist() for name in names])
    assert outcomes[0] == outcomes[1]
    assert sorted(large[0].taken) == ["a", "a", "b", "b"], "all but the last, once it is known what a step reads"


def test_what_is_staged_of_a_trainer_that_died_is_dropped(start: Start) -> None:
    job = start(trainers=2)
    for trainer in (0, 1):
        job.step(trainer, trainer)
    sent_ahead(job, 1, 1.0)
    finish = sent_ahead(job, 0, 2.0)
    dead = next(client for client in job.clients if client.descriptor.trainer == 1)
    for at in (0, 1):
        dead._session.disarm(at)  # as its connections break
    until(lambda: all(len(of) == 1 for server in job.servers for of in server._state.staged_pushes._gradients.values()))
    finish()
    assert staged(job) == [set(), set()]
    assert [blocks[-1] for blocks in taken(job)] == ["w.block0", "w.block1"]


def test_a_push_by_message_makes_what_was_staged_void(start: Start) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start(trainers=2, by_python=by_python)
        job.step(0)
        finish = sent_ahead(job, 0, 1.0)
        OPS.send([torch.full((3, 4), 3.0)], job.remotes[1], "w", ["w.block0"], [0])
        finish()
        outcomes.append(job.everything())
    assert outcomes[0] == outcomes[1]
    assert taken(job) == [[], ["w.block1"]]


def test_a_staged_push_whose_connection_breaks_is_applied_once(start: Start) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start(by_python=by_python)
        job.step(0)
        finish = sent_ahead(job, 0, 1.0)
        if not by_python:
            job.clients[0]._session.disarm(0)
        read = finish()
        outcomes.append((read, job.everything(), [t.tolist() for t in job.step(1)], job.everything()))
    assert outcomes[0] == outcomes[1]
    assert taken(job) == [["w.block0"], ["w.block1"]], "of the last step alone"


def test_a_refused_step_leaves_nothing_staged(start: Start) -> None:
    outcomes = []
    for by_python in (True, False):
        job = start(by_python=by_python)
        job.step(0)
        for storage in job.storages:
            storage.capacity["ids"] = 0
        finish = sent_ahead(job, 0, 1.0)
        with pytest.raises(PenstockError, match="table 'ids' is full"):
            finish()
        outcomes.append(job.everything())
        assert staged(job) == [set(), set()]
    assert outcomes[0] == outcomes[1]


def test_staged_pushes_are_in_the_log(start: Start, tmp_path: Path) -> None:
    job = start(state_dir=tmp_path)
    for seed in range(3):
        job.step(seed)
    assert all(taken(job))
    again = stored("async")
    for server, storage in zip(job.servers, again, strict=True):
        folder = server.settings.folder
        assert folder is not None
        recover_server(
            folder, storage, AppliedIndex(trainers=1, keeps_changes=False), job="local", blocks=list(storage.blocks())
        )
    expected, job.storages = job.everything(), again
    assert job.everything() == expected
