"""States of job, replica and node, and the tables of the transitions that are allowed.

Terminal states are final. A stop is a state with a reason, and the terminal state is *derived* from
the reason by `terminal_of`. Every change of state in the server goes through one function over these
tables (`penstock_server.services.transitions`), which also writes the event row.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """States of a job; a retry is a new attempt of the same job."""

    CREATED = "CREATED"
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class ReplicaState(StrEnum):
    """States of one process of an attempt. UNKNOWN: its agent is unreachable, within grace."""

    ASSIGNED = "ASSIGNED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    UNKNOWN = "UNKNOWN"
    EXITED = "EXITED"
    KILLED = "KILLED"
    LOST = "LOST"


class NodeState(StrEnum):
    """States of a node, that is, of the agent on it."""

    JOINING = "JOINING"
    READY = "READY"
    CORDONED = "CORDONED"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    UNREACHABLE = "UNREACHABLE"
    DOWN = "DOWN"


class StopReason(StrEnum):
    """Why a job stops. `terminal_of` derives the terminal state from it."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    REPLICA_FAILED = "replica_failed"
    START_FAILED = "start_failed"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"
    MAX_DURATION = "max_duration"
    HANG = "hang"
    NO_CAPACITY = "no_capacity"
    DETACHED = "detached"


J, R, N = JobState, ReplicaState, NodeState

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    J.CREATED: frozenset({J.QUEUED, J.RUNNING}),  # RUNNING: an attached job has no scheduler
    J.QUEUED: frozenset({J.STARTING, J.STOPPING}),
    J.STARTING: frozenset({J.RUNNING, J.STOPPING, J.RECOVERING}),
    J.RUNNING: frozenset({J.STOPPING, J.RECOVERING}),
    J.RECOVERING: frozenset({J.STARTING, J.STOPPING}),
    J.STOPPING: frozenset({J.SUCCEEDED, J.FAILED, J.CANCELLED}),
    J.SUCCEEDED: frozenset(),
    J.FAILED: frozenset(),
    J.CANCELLED: frozenset(),
}

REPLICA_TRANSITIONS: dict[ReplicaState, frozenset[ReplicaState]] = {
    R.ASSIGNED: frozenset({R.PREPARING, R.RUNNING, R.EXITED, R.KILLED, R.LOST}),
    R.PREPARING: frozenset({R.RUNNING, R.EXITED, R.KILLED, R.LOST, R.UNKNOWN}),
    R.RUNNING: frozenset({R.EXITED, R.KILLED, R.LOST, R.UNKNOWN}),
    R.UNKNOWN: frozenset({R.PREPARING, R.RUNNING, R.EXITED, R.KILLED, R.LOST}),
    R.EXITED: frozenset(),
    R.KILLED: frozenset(),
    R.LOST: frozenset(),
}

NODE_TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    N.JOINING: frozenset({N.READY}),
    N.READY: frozenset({N.CORDONED, N.DRAINING, N.UNREACHABLE, N.DOWN}),
    N.CORDONED: frozenset({N.READY, N.DRAINING, N.UNREACHABLE, N.DOWN}),
    N.DRAINING: frozenset({N.DRAINED, N.READY, N.UNREACHABLE, N.DOWN}),
    N.DRAINED: frozenset({N.READY, N.UNREACHABLE, N.DOWN}),
    N.UNREACHABLE: frozenset({N.READY, N.DOWN}),
    N.DOWN: frozenset({N.READY}),
}

PREEMPTED = "preempted: "
"""How the detail of a replica begins that was ended because its attempt makes room, or its node leaves."""

SAVED_AT = PREEMPTED + "it ended in order, with a checkpoint of step "
"""How the detail of a trainer begins that has saved at a step boundary (`preemption`); the step follows."""

NOT_SAVED = "; it had saved at no step boundary by then"
"""How the detail of a preempted replica ends that was asked to save and did not."""

OUT_OF_MEMORY = "out of memory"
"""How the detail of a replica begins that took more memory than its job's limits allow."""

TERMINAL_JOB = frozenset({J.SUCCEEDED, J.FAILED, J.CANCELLED})
ACTIVE_JOB = tuple(state for state in J if state not in TERMINAL_JOB)
TERMINAL_REPLICA = frozenset({R.EXITED, R.KILLED, R.LOST})
LIVE_REPLICA = tuple(state for state in R if state not in TERMINAL_REPLICA)


def saved_step(detail: str) -> int | None:
    """Return the step that a preempted trainer has saved and ended after, None if it has not."""
    step = detail.removeprefix(SAVED_AT)
    return int(step) if step != detail and step.isascii() and step.isdecimal() and len(step) < 19 else None


def terminal_of(reason: StopReason) -> JobState:
    """Return the terminal state that a stop for `reason` ends in."""
    match reason:
        case StopReason.COMPLETED | StopReason.DETACHED:
            return J.SUCCEEDED
        case StopReason.CANCELLED:
            return J.CANCELLED
        case (
            StopReason.REPLICA_FAILED
            | StopReason.START_FAILED
            | StopReason.NODE_LOST
            | StopReason.PREEMPTED
            | StopReason.MAX_DURATION
            | StopReason.HANG
            | StopReason.NO_CAPACITY
        ):
            return J.FAILED
