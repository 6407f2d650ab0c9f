"""Nobody to wait for: each process ends within its bound, with an error that names who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.faults.fluid_jobs import Job, Process, Undisturbed

SHORT_S = 3.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def fails_in_time(process: Process, before: float, since: float, slack_s: float) -> str:
    """Wait for its end, with an error; return what it said last. What it misses went between `before` and `since`."""
    assert process.end() == 1
    assert time.monotonic() - before >= SHORT_S - 1
    assert time.monotonic() - since < SHORT_S + slack_s
    return process.errors.splitlines()[-1]


def test_a_server_that_is_gone_for_good_is_named_by_its_trainers(
    job: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    one = job(servers=2, PENSTOCK_PS_DEADLINE_S=str(SHORT_S), PENSTOCK_PS_LEASE_S="2")
    gone, other = one.server(0), one.server(1)
    trainers = [one.trainer(t) for t in (0, 1)]
    trainers[0].reaches(20)
    before = time.monotonic()
    gone.kill()
    since = time.monotonic()
    for trainer in trainers:
        said = fails_in_time(trainer, before, since, undisturbed.slack_s)
        assert f"Unavailable: parameter server {one.endpoints[0]} has been unreachable for" in said
        assert one.endpoints[1] not in said
    assert len(trainers[0].losses) >= 20
    # The other server waits for trainers to come back, which is not of this test.
    other.close()


def test_who_was_never_started_is_named(job: Callable[..., Job], undisturbed: Undisturbed) -> None:
    """Two jobs at the same time: a server whose second trainer, and trainers whose second server, do not come."""
    before = time.monotonic()
    alone = job(PENSTOCK_PS_START_S=str(SHORT_S))
    halved = job(servers=2, PENSTOCK_PS_START_S=str(SHORT_S))
    server, waiting = alone.server(), halved.server(0)
    trainers = [halved.trainer(t) for t in (0, 1)]
    since = time.monotonic()
    said = fails_in_time(server, before, since, undisturbed.slack_s)
    assert "Unavailable: trainers 0, 1 of 2 did not join" in said
    assert alone.endpoints[0] in said
    for trainer in trainers:
        said = fails_in_time(trainer, before, since, undisturbed.slack_s)
        assert f"Unavailable: the parameter servers {halved.endpoints[1]} did not start" in said
    waiting.close()
