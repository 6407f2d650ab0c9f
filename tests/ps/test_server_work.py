"""What a server records of its work: each request, round and lookup, by native code and by Python alike."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.ps.channel_jobs import Job, Start
from tests.ps.test_prepared_steps import start, step
from tests.support.waiting import until

from penstock.protocol.frames import FIRST_BLOCK, ROUNDS_LANE, Work
from penstock.ps.remote import PsMode
from penstock.ps.server import ParameterServer
from penstock.telemetry.input import Events

__all__ = ["start"]
STEPS = 6


def work_of(server: ParameterServer) -> Events:
    events, lost = server._state.work.take()
    assert lost == 0
    return events


def settled_work(server: ParameterServer) -> Events:
    """Return what was recorded once each request that came is answered: a trainer has its answer before that."""
    found = [work_of(server)]

    def is_settled() -> bool:
        found.append(work_of(server))
        kinds = Counter(np.concatenate(found)["work"].tolist())
        return kinds[Work.RECEIVE] == kinds[Work.ANSWER]

    until(is_settled, "the answers")
    return np.concatenate(found)


def run(job: Job, num_trainers: int) -> tuple[Events, int, int]:
    """Run the steps of all trainers; return what the server recorded, and when it began and ended.

    Steps before go over messages, until channels are open.
    """
    [server] = job.servers
    server._state.work.watch()
    steps(job, num_trainers, range(2))
    settled_work(server)
    begin_ns = time.time_ns()
    steps(job, num_trainers, range(2, 2 + STEPS))
    return settled_work(server), begin_ns, time.time_ns()


def steps(job: Job, num_trainers: int, seeds: range) -> None:
    """Run steps of all trainers at the same time."""

    def run_all(trainer: int) -> None:
        for seed in seeds:
            step(job, seed, trainer)

    with ThreadPoolExecutor(num_trainers) as pool:
        list(pool.map(run_all, range(num_trainers)))


def counts(events: Events) -> Counter[tuple[str, int]]:
    return Counter(
        (Work(work).name, lane) for work, lane in zip(events["work"], events["thread"].tolist(), strict=True)
    )


@pytest.mark.parametrize("natively", [True, False])
def test_each_request_round_and_lookup_is_recorded(start: Start, natively: bool) -> None:
    job = start("sync", num_trainers=2, natively=natively)
    events, begin_ns, end_ns = run(job, 2)
    found = counts(events)
    for trainer in (0, 1):  # a lookup and a step each
        assert found["RECEIVE", trainer] == found["ANSWER", trainer] == 2 * STEPS
    table = FIRST_BLOCK + list(job.servers[0]._state.specs).index("table")
    assert found["LOOK_UP", table] == 2 * STEPS
    assert found["UPDATE", ROUNDS_LANE] == found["MERGE", ROUNDS_LANE] == STEPS
    assert sum(found["ROUND", trainer] for trainer in (0, 1)) >= STEPS  # all but the last one wait
    assert (events["begin_ns"] <= events["end_ns"]).all()
    assert (begin_ns <= events["begin_ns"]).all() and (events["end_ns"] <= end_ns).all()


@pytest.mark.parametrize("natively", [True, False])
def test_updates_lie_within_the_waits_for_their_rounds(start: Start, natively: bool) -> None:
    events, *_ = run(start("sync", num_trainers=2, natively=natively), 2)
    waits = events[events["work"] == Work.ROUND]
    for update in events[events["work"] == Work.UPDATE]:
        assert ((waits["begin_ns"] <= update["begin_ns"]) & (update["end_ns"] <= waits["end_ns"])).any()


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_pushes_without_rounds_are_updates_of_their_trainers(start: Start, mode: PsMode) -> None:
    events, *_ = run(start(mode, num_trainers=1), 1)
    found = counts(events)
    assert found["UPDATE", 0] + found["UPDATE", ROUNDS_LANE] + found["UPDATE", FIRST_BLOCK] >= 1
    assert not (events["work"] == Work.ROUND).any()


def test_nothing_is_recorded_before_it_is_watched(start: Start) -> None:
    job = start("sync")
    step(job, 1)
    assert len(work_of(job.servers[0])) == 0


def test_work_that_nobody_takes_is_bounded_and_counted(start: Start) -> None:
    [server] = start("sync").servers
    server._state.work.watch()
    for _ in range(20_000):
        server._state.traffic.add_work(Work.UPDATE, ROUNDS_LANE, 1, 2)
    events, lost = server._state.work.take()
    assert (len(events), lost) == (1 << 14, 20_000 - (1 << 14))
    assert np.unique(events).tolist() == [(1, 2, Work.UPDATE, ROUNDS_LANE)]
