"""The one door through which a state changes: checked against the tables, written with its event.

The event row and the state are in one transaction, so the state of a row is always the fold of its
events. Who calls this decides nothing here; decisions are in `lifecycle`, `leases` and `placement`.
"""

from __future__ import annotations

from datetime import datetime

from penstock.errors import Bug
from penstock.protocol.states import (
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    REPLICA_TRANSITIONS,
    TERMINAL_JOB,
    TERMINAL_REPLICA,
    JobState,
    NodeState,
    ReplicaState,
)
from penstock_server.db import Tx
from penstock_server.tables import EventRow, JobRow, NodeRow, ReplicaRow
from penstock_server.uuid7 import uuid7

State = JobState | ReplicaState | NodeState
_MAX_DETAIL = 4000
_MAKES_NO_ROOM = frozenset({"ASSIGNED", "PREPARING", "STARTING", "RUNNING"})
"""States of jobs and replicas after which no job that waits has more room than before."""


def allowed(before: State, after: State) -> bool:
    """Whether the tables allow this change."""
    match before, after:
        case JobState(), JobState():
            return after in JOB_TRANSITIONS[before]
        case ReplicaState(), ReplicaState():
            return after in REPLICA_TRANSITIONS[before]
        case NodeState(), NodeState():
            return after in NODE_TRANSITIONS[before]
        case _:
            return False


def created(tx: Tx, row: JobRow | ReplicaRow | NodeRow, *, at: datetime, reason: str = "", detail: str = "") -> None:
    """Add a new row, whose state is set already, and its first event. Written with the next statement or the commit."""
    tx.session.add(row)
    _record(tx, row, None, row.state, at, reason, detail)


def transition(
    tx: Tx, row: JobRow | ReplicaRow | NodeRow, after: State, *, at: datetime, reason: str = "", detail: str = ""
) -> None:
    """Change the state of `row`. Raises Bug if the tables do not allow it; then nothing is changed."""
    before = _state_of(row)
    if not allowed(before, after):
        raise Bug(f"{type(row).__name__} {row.id} may not go from {before} to {after} ({reason}): report it")
    row.state = after.value
    row.state_at = at
    if isinstance(row, JobRow):
        _stamp_job(row, JobState(after), at, reason, detail)
    elif isinstance(row, ReplicaRow):
        _stamp_replica(row, ReplicaState(after), at, detail)
    else:
        row.reason, row.reason_detail = reason, detail[:_MAX_DETAIL]
    _record(tx, row, before.value, after.value, at, reason, detail)


def noted(tx: Tx, row: JobRow | NodeRow, *, at: datetime, reason: str, detail: str) -> None:
    """Write an event of a job or a node that does not change its state."""
    if isinstance(row, NodeRow):
        row.reason, row.reason_detail = reason, detail[:_MAX_DETAIL]
    _record(tx, row, row.state, row.state, at, reason, detail)


def _state_of(row: JobRow | ReplicaRow | NodeRow) -> State:
    match row:
        case JobRow():
            return JobState(row.state)
        case ReplicaRow():
            return ReplicaState(row.state)
        case NodeRow():
            return NodeState(row.state)


def _stamp_job(row: JobRow, after: JobState, at: datetime, reason: str, detail: str) -> None:
    if after is JobState.RUNNING and row.started_at is None:
        row.started_at = at
    if after in TERMINAL_JOB:
        row.finished_at = at
    if reason:
        row.reason, row.reason_detail = reason, detail[:_MAX_DETAIL]


def _stamp_replica(row: ReplicaRow, after: ReplicaState, at: datetime, detail: str) -> None:
    if after is ReplicaState.RUNNING and row.started_at is None:
        row.started_at = at
    if after in TERMINAL_REPLICA:
        row.finished_at = at
    if detail:
        row.reason = detail[:_MAX_DETAIL]


def _record(
    tx: Tx,
    row: JobRow | ReplicaRow | NodeRow,
    before: str | None,
    after: str,
    at: datetime,
    reason: str,
    detail: str,
) -> None:
    kind = type(row).__name__.removesuffix("Row").lower()
    job_id = row.id if isinstance(row, JobRow) else row.job_id if isinstance(row, ReplicaRow) else None
    event = EventRow(
        id=uuid7(),
        at=at,
        kind=kind,
        subject=row.id,
        job_id=job_id,
        from_state=before,
        to_state=after,
        reason=reason,
        detail=detail[:_MAX_DETAIL],
    )
    tx.effects.events.append(event)
    tx.effects.schedule |= kind == "node" or after not in _MAKES_NO_ROOM
    if job_id is not None:
        tx.effects.jobs.add(job_id)
    node_id = row.id if isinstance(row, NodeRow) else row.node_id if isinstance(row, ReplicaRow) else None
    if node_id is not None:
        tx.effects.nodes.add(node_id)
