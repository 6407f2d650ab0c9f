"""How a preempted attempt ends: by saves at a step boundary where that is possible, else by a stop. Pure.

An attempt is RECOVERING from the moment that it is preempted. Its replicas are not wanted any more, and stopped by
their agents, unless `has_notice`: then the agents ask them to save and to end (`penstock.protocol.preemption`). That
follows from rows alone, each time that orders are made, so a server that restarts goes on with it; and a process that
fails meanwhile takes the notice from the others, which would wait for it in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocol.jobspec import Checkpoint
from penstock.protocol.states import NOT_SAVED, TERMINAL_REPLICA, JobState, ReplicaState, StopReason, saved_step
from penstock_server.services.lifecycle import JobFacts, ReplicaFacts, is_done


def grace_s(spec: Mapping[str, Any]) -> float:
    """Return how long a preempted attempt of a job has to save, in seconds; 0 if it is stopped at once."""
    given = spec.get("checkpoint")
    return 0.0 if given is None else Checkpoint.model_validate(given).preempt_grace_s


def has_notice(job: JobFacts) -> bool:
    """Whether the trainers of an attempt are asked to save. A process that does not run could not take part.

    As long as one of them runs, its pservers are wanted: they write their parts of the checkpoint.
    """
    if job.state is not JobState.RECOVERING or job.reason != StopReason.PREEMPTED:
        return False
    has_trainer = any(_runs(one) for one in job.replicas if one.role == "trainer")
    return has_trainer and all(_runs(one) or _ended_in_order(one) for one in job.replicas)


def outcome(job: JobFacts) -> str:
    """Describe what a preempted attempt has saved, once all of its trainers have ended; '' before, and without notice.

    Each of them has named the checkpoint that has its part: trainer 0 wrote it, or another one after the end of that.
    """
    trainers = [one for one in job.replicas if one.role == "trainer"]
    if job.state is not JobState.RECOVERING or job.reason != StopReason.PREEMPTED:
        return ""
    if not trainers or any(one.state not in TERMINAL_REPLICA for one in trainers):
        return ""
    step = max((found for one in trainers if (found := saved_step(one.detail)) is not None), default=None)
    if step is not None:
        return f"preempted at step {step}, checkpoint {step} is written: the next attempt resumes there"
    if any(one.detail.endswith(NOT_SAVED) for one in trainers):
        return "preempted without a checkpoint of its last step: the next attempt resumes from the one before"
    return ""


def _runs(replica: ReplicaFacts) -> bool:
    return replica.started and replica.state in (ReplicaState.RUNNING, ReplicaState.UNKNOWN)


def _ended_in_order(replica: ReplicaFacts) -> bool:
    return is_done(replica) or saved_step(replica.detail) is not None
