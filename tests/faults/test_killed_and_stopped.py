"""Processes that are killed, started again, or stand still: the job goes on, each acknowledged step counts once.

A server stands still for 6 s, two of its leases; a trainer for its lease and a few steps of the other, since those
compute all the time. `make soak` has 20 s for both.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from tests.faults.fluid_jobs import Job, Left, Undisturbed
from tests.support.waiting import until

LEASE_S = 3.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_killed_trainer_leaves_within_its_lease_and_can_rejoin(
    job: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    one = job(PENSTOCK_PS_LEASE_S=str(LEASE_S))
    server, stop = one.server(), one.folder / "stop"
    first, killed = one.trainer(0, "--until", stop), one.trainer(1)
    killed.reaches(20)
    killed.kill()
    since, before = time.monotonic(), len(first.losses)
    until(lambda: len(first.losses) > before + 2, "the round closes without the lost trainer")
    assert time.monotonic() - since < LEASE_S + undisturbed.slack_s
    assert "trainer 1 is lost" in server.errors
    again = one.trainer(1, "--first", 5000, "--steps", 15)
    assert again.end() == 0, again.errors
    stop.touch()
    one.all_end_well()
    left, steps = Left(one), first.losses
    of_first, of_killed = left.applied(0), left.applied(1)
    # The mean is over two while there are two, and over one while there is one.
    assert list(of_first) == list(steps), "each acknowledged step is applied, and no other"
    assert set(of_first.values()) <= {1.0, 2.0}, "none is applied twice"
    together = [step for step, added in of_first.items() if added == 1.0]
    acknowledged = len(killed.losses)
    assert list(of_killed)[:acknowledged] == list(range(acknowledged))
    assert list(of_killed)[-15:] == list(range(5000, 5015))
    assert len(of_killed) - acknowledged - 15 in (0, 1), "at most the step that it was killed in"
    assert set(of_killed.values()) == {1.0}
    assert len(together) == len(of_killed)
    assert left.wide == [2.0 * len(steps), sum(of_first.values()), sum(of_killed.values())]


@pytest.mark.parametrize("still_s", [LEASE_S, pytest.param(20.0, marks=pytest.mark.soak)])
def test_a_stopped_trainer_is_left_out_and_comes_back(
    job: Callable[..., Job], undisturbed: Undisturbed, still_s: float
) -> None:
    one = job(PENSTOCK_PS_LEASE_S=str(LEASE_S))
    server, stop = one.server(), one.folder / "stop"
    first, stopped = one.trainer(0, "--until", stop), one.trainer(1, "--until", stop)
    stopped.reaches(20)
    stopped.signal(signal.SIGSTOP)
    since, before = time.monotonic(), len(first.losses)
    until(lambda: len(first.losses) > before + 2, "the round closes without the lost trainer")
    assert time.monotonic() - since < LEASE_S + undisturbed.slack_s
    assert "trainer 1 is lost" in server.errors
    assert not first.has_ended(max(0.0, since + still_s - time.monotonic()))
    stopped.signal(signal.SIGCONT)
    steps = len(stopped.losses)
    stopped.reaches(steps + 10)
    stop.touch()
    one.all_end_well()
    left = Left(one)
    of_first, of_stopped = left.applied(0), left.applied(1)
    assert list(of_first) == list(first.losses)
    assert set(of_first.values()) == {1.0, 2.0}
    assert set(of_stopped.values()) <= {1.0, 2.0}
    missing = [step for step in stopped.losses if step not in of_stopped]
    # The step that it stood still in may be left out with its lease, which it says.
    assert len(missing) <= 1
    assert not of_stopped.keys() - stopped.losses.keys()
    assert "has joined" in stopped.errors
    assert left.wide[1:] == [sum(of_first.values()), sum(of_stopped.values())]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_restarted_server_has_all_that_it_acknowledged(
    job: Callable[..., Job], undisturbed: Undisturbed, mode: str
) -> None:
    one = job(mode=mode, servers=2, PENSTOCK_PS_LEASE_S="20")
    killed, _ = one.server(0), one.server(1)
    pace = one.pace(90)
    trainers = [one.trainer(t, "--steps", undisturbed.steps, "--pace", pace) for t in (0, 1)]
    for steps in (30, 70):
        trainers[0].reaches(steps)
        killed.kill()
        killed = one.server(0)
    one.pace(undisturbed.steps)
    one.all_end_well()
    undisturbed.is_what_became_of(one, trainers)


def test_a_server_stopped_by_a_signal_needs_no_state_folder(job: Callable[..., Job], undisturbed: Undisturbed) -> None:
    one = job(PENSTOCK_PS_STATE_DIR="", PENSTOCK_JOB_ID="")
    pace, default = one.pace(60), one.folder / "penstock_state"
    server, trainers = one.server(), [one.trainer(t, "--steps", undisturbed.steps, "--pace", pace) for t in (0, 1)]
    for steps, number, status in ((20, signal.SIGTERM, 143), (50, signal.SIGINT, 130)):
        trainers[0].reaches(steps)
        server.signal(number)
        assert server.end() in (status, -number), server.errors
        assert list(default.iterdir()), server.errors
        server = one.server()
    one.pace(undisturbed.steps)
    one.all_end_well()
    assert [t.losses for t in trainers] == undisturbed.losses
    assert not default.exists()


@pytest.mark.parametrize(
    ("mode", "still_s"),
    [
        ("sync", 6.0),
        ("async", 6.0),
        pytest.param("sync", 20.0, marks=pytest.mark.soak),
        pytest.param("async", 20.0, marks=pytest.mark.soak),
    ],
)
def test_a_server_that_hangs_longer_than_a_lease_loses_nothing(
    job: Callable[..., Job], undisturbed: Undisturbed, mode: str, still_s: float
) -> None:
    one = job(mode=mode, PENSTOCK_PS_LEASE_S=str(LEASE_S))
    server = one.server()
    pace = one.pace(90)
    trainers = [one.trainer(t, "--steps", undisturbed.steps, "--pace", pace) for t in (0, 1)]
    trainers[0].reaches(30)
    server.signal(signal.SIGSTOP)
    one.pace(undisturbed.steps)
    stopped = time.monotonic()
    assert not trainers[0].has_ended(still_s)
    steps = len(trainers[0].losses)
    assert steps < undisturbed.steps
    server.signal(signal.SIGCONT)
    trainers[0].reaches(steps + 1)
    assert time.monotonic() - stopped < still_s + undisturbed.slack_s
    one.all_end_well()
    undisturbed.is_what_became_of(one, trainers)
