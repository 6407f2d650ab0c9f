"""A wall clock that is set forward by an hour ends nothing an hour early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.control_plane import ControlPlane

from penstock.protocol.jobspec import JobSpec

HOUR_S, LIMIT_S = 3600.0, 20.0


@pytest.fixture
def plane(migrated: Path) -> Iterator[ControlPlane]:
    ControlPlane.template = migrated
    made = ControlPlane()
    made.begin()
    yield made
    made.teardown()


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
