"""Restarts of a job whose processes were replaced: each failure is charged, whatever had started when the node went."""

from __future__ import annotations

from tests.faults.control_plane import ControlPlane


def test_loss_of_replacements_that_wait_is_charged(plane: ControlPlane) -> None:
    """Trainer and pserver failed and were replaced, neither replacement has started, and their nodes go silent."""
    plane.submit(trainers=1, pservers=1, restarts=5, on=["infra", "user"], cpus=1)
    plane.settle_down(6)
    for number in (0, 0, 1, 1):
        plane.end(number, 0, "fails")
    plane.settle_messages(3)  # reports alone: no order reaches an agent
    plane.step("schedule")
    assert [job.restarts for job in plane.seen().jobs] == [2]
    plane.wait(100.0)
    plane.step("watch")
    assert [job.restarts for job in plane.seen().jobs] == [3]
    plane.invariants_hold()
