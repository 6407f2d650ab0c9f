"""A wall clock that is set back by an hour delays nothing by an hour; and a silent node loses no knowledge."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from tests.faults.control_plane import ControlPlane
from tests.faults.simulated_server import TTL_S

from penstock_server.services.backoff import FIRST, LONGEST, is_due

HOUR_S, STEP_BACK_S = 3600.0, 8.0


@pytest.fixture
def state(plane: ControlPlane) -> Callable[[], list[str]]:
    """Return the states of the jobs, oldest first."""
    return lambda: [job.state for job in sorted(plane.seen().jobs, key=lambda one: one.id)]


def submit(plane: ControlPlane, *, pservers: int = 0, restarts: int = 3) -> None:
    plane.submit(trainers=1, pservers=pservers, restarts=restarts, on=["infra", "user"], cpus=1)


@pytest.mark.parametrize("pservers", [0, 1])
def test_placed_job_starts_after_clock_was_set_back(
    plane: ControlPlane, state: Callable[[], list[str]], pservers: int
) -> None:
    submit(plane, pservers=pservers)
    plane.step("schedule")
    plane.jump(-HOUR_S)
    plane.settle_down(6)
    assert state() == ["RUNNING"]


def test_running_job_survives_a_small_step_back(plane: ControlPlane, state: Callable[[], list[str]]) -> None:
    """The second job has the node's orders sent again: what runs is in them, whatever the clock says."""
    submit(plane, restarts=0)
    plane.settle_down(4)
    for one in plane.seen().replicas:
        assert one.state == "RUNNING"
    plane.jump(-STEP_BACK_S)
    submit(plane, restarts=0)
    plane.settle_down(4)
    assert state() == ["RUNNING", "RUNNING"]


def test_paused_job_restarts_after_clock_was_set_back(plane: ControlPlane, state: Callable[[], list[str]]) -> None:
    submit(plane, restarts=20)
    for _ in range(4):  # soon after each other, so that a pause follows
        plane.settle_down(6)
        for number in (0, 1):
            plane.end(number, 0, "fails")
        plane.settle_down(2)
    assert state() == ["RECOVERING"]
    plane.jump(-HOUR_S)
    plane.settle_down(20)
    assert state() == ["RUNNING"]


def test_stop_has_a_deadline_after_clock_was_set_back(plane: ControlPlane, state: Callable[[], list[str]]) -> None:
    submit(plane)
    plane.settle_down(4)
    assert state() == ["RUNNING"]
    plane.cancel(0)
    plane.jump(-HOUR_S)
    for _ in range(20):  # the agent sends heartbeats, but its guard does not end the process
        plane.step("publish")
        plane.step("watch")
        plane.settle_messages(1)
        plane.wait(1.0)
    assert state() == ["CANCELLED"]


@pytest.mark.parametrize("is_same_connection", [False, True])
def test_silent_node_does_not_make_a_replica_started(plane: ControlPlane, *, is_same_connection: bool) -> None:
    """A replica that had not started is PREPARING again when its node is back, not RUNNING."""
    submit(plane)
    plane.step("schedule")
    plane.step("publish")
    plane.settle_messages(1)
    assert [one.state for one in plane.seen().replicas] == ["PREPARING"]
    plane.wait(1.5 * TTL_S)
    plane.step("watch")
    assert [one.state for one in plane.seen().replicas] == ["UNKNOWN"]
    for node in plane.nodes if is_same_connection else ():
        node.heard_at = plane.clock.monotonic()
    plane.settle_messages(3)
    plane.step("watch")
    assert [one.state for one in plane.seen().replicas] == ["PREPARING"]


def test_pause_longer_than_any_is_over() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert is_due(now, now)
    assert is_due(now - FIRST, now)
    assert not is_due(now + FIRST, now)
    assert not is_due(now + LONGEST, now)
    assert is_due(now + timedelta(hours=1), now)


def test_node_that_was_gone_connects_again(plane: ControlPlane) -> None:
    """Its connection outlived its lease: it was stopped. The server ends it, so that a hello follows."""
    plane.wait(100.0)
    plane.step("watch")
    assert {node.state for node in plane.seen().nodes} == {"DOWN"}
    for node in plane.nodes:
        node.heard_at = plane.clock.monotonic()
    plane.settle_down(4)
    assert {node.state for node in plane.seen().nodes} == {"READY"}
