"""A wall clock that is set forward by an hour ends nothing an hour early."""

from __future__ import annotations

from datetime import datetime

import pytest
from tests.faults.control_plane import ControlPlane, Jumping

from penstock.protocol.jobspec import JobSpec
from penstock_server.clock import SystemClock
from penstock_server.db import DatabaseAway

HOUR_S, LIMIT_S = 3600.0, 20.0


def states(plane: ControlPlane) -> list[str]:
    return [job.state for job in plane.seen().jobs]


def submit(plane: ControlPlane, **fields: object) -> None:
    small = {"count": 1, "cpus": 1, "memory": "16MiB"}
    spec = {"name": "job", "entrypoint": ["true"], "mode": "command", "trainers": small, **fields}
    plane.jobs.append(plane.do(plane.server.submit(JobSpec.model_validate(spec))))


def test_job_with_a_limit_runs_as_long_as_without_a_jump(plane: ControlPlane) -> None:
    submit(plane, max_duration_s=LIMIT_S)
    plane.settle_down(4)  # a second each
    plane.jump(HOUR_S)
    plane.settle_down(12)
    assert states(plane) == ["RUNNING"]
    plane.settle_down(8)
    assert states(plane) == ["FAILED"]


def test_stop_has_its_time_after_clock_was_set_forward(plane: ControlPlane) -> None:
    submit(plane, stop_grace_s=30.0)
    plane.settle_down(4)
    plane.cancel(0)
    plane.step("watch")
    plane.jump(HOUR_S)
    plane.step("watch")
    assert [one.state for one in plane.seen().replicas] == ["RUNNING"]


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, -1.0])
def test_pserver_lingers_whatever_the_clock_says(plane: ControlPlane, jump_s: float) -> None:
    """Two seconds after its trainers' end, not sooner, it is not wanted any more; and it is stopped, not lost."""
    submit(plane, mode="pserver", pservers={"count": 1, "cpus": 1, "memory": "16MiB"})
    plane.settle_down(4)
    for node in plane.nodes:
        for machine in node.alive():
            if machine.desired.role == "trainer":
                machine.end("EXITED", exit_code=0)
    plane.settle_messages(2)
    plane.step("watch")
    assert states(plane) == ["STOPPING"]
    plane.jump(jump_s)
    plane.step("watch")
    plane.step("publish")
    plane.settle_messages(1)
    assert not any(machine.stop_asked for node in plane.nodes for machine in node.alive())
    plane.wait(2.0)
    plane.settle_down(4)
    assert states(plane) == ["SUCCEEDED"]
    assert {one.state for one in plane.seen().replicas} == {"EXITED", "KILLED"}


class Machine(SystemClock):
    """The clock that a server on the machine of `clock` has from its start on."""

    def __init__(self, clock: Jumping) -> None:
        self._machine = clock
        super().__init__()

    def now(self) -> datetime:
        now: datetime = self._machine.now()
        return now

    def monotonic(self) -> float:
        return self._machine.monotonic()


def restart(plane: ControlPlane) -> None:
    plane.crash_server(luck=False)
    plane.server.clock = Machine(plane.clock)  # type: ignore[assignment]
    plane.crash_server(luck=True)  # which starts it


def test_limit_of_a_job_outlives_a_restart_after_a_jump(plane: ControlPlane) -> None:
    """The clock was an hour slow when the server started; a job that begins after its correction has its whole time."""
    restart(plane)
    plane.settle_down(2)
    plane.jump(HOUR_S)
    submit(plane, max_duration_s=LIMIT_S)
    plane.settle_down(4)
    restart(plane)
    plane.settle_down(10)
    assert states(plane) == ["RUNNING"]
    plane.settle_down(12)
    assert states(plane) == ["FAILED"]


def test_limit_goes_on_over_a_restart(plane: ControlPlane) -> None:
    submit(plane, max_duration_s=LIMIT_S)
    plane.settle_down(4)
    plane.crash_server(luck=False)
    plane.wait(LIMIT_S)
    plane.crash_server(luck=True)
    plane.settle_down(4)
    assert states(plane) == ["FAILED"]


def test_pserver_is_released_although_the_database_was_away(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(plane, mode="pserver", pservers={"count": 1, "cpus": 1, "memory": "16MiB"}, stop_grace_s=600.0)
    plane.settle_down(4)
    for node in plane.nodes:
        for machine in node.alive():
            if machine.desired.role == "trainer":
                machine.end("EXITED", exit_code=0)
    plane.settle_messages(2)
    plane.step("watch")
    plane.step("publish")
    plane.settle_messages(1)
    plane.wait(3.0)
    assert plane.server.runtime is not None

    async def refused(*_: object) -> None:
        raise DatabaseAway("the disk of the server is full")

    with monkeypatch.context() as away:
        away.setattr(plane.server.runtime.database, "_write_last", refused)
        with pytest.raises(DatabaseAway):
            plane.do(plane.server.runtime.reports.overdue())
    plane.settle_down(4)
    assert states(plane) == ["SUCCEEDED"]
