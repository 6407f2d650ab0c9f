"""Rows as the API shows them. What the telemetry knows and the row does not yet comes from `live`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import TERMINAL_REPLICA, JobState, NodeState, ReplicaState
from penstock_server.schemas import api
from penstock_server.streams.live import Live, LiveJob
from penstock_server.tables import EventRow, JobRow, NodeRow, ReplicaRow

_BUSY = [s.value for s in ReplicaState if s not in TERMINAL_REPLICA]


def replica_view(row: ReplicaRow) -> api.Replica:
    """Show a replica."""
    return api.Replica(**{name: getattr(row, name) for name in api.Replica.model_fields})


def event_view(row: EventRow) -> api.Event:
    """Show an event."""
    return api.Event.model_validate(
        {
            "id": row.id,
            "at": row.at,
            "kind": row.kind,
            "subject": row.subject,
            "from": row.from_state,
            "to": row.to_state,
            "reason": row.reason,
            "detail": row.detail,
        }
    )


async def job_views(session: AsyncSession, rows: Sequence[JobRow], live: Live) -> list[api.Job]:
    """Show jobs with the replicas of their current attempts. One query for all replicas."""
    placed = [row.id for row in rows if row.attempt]
    found: dict[str, list[ReplicaRow]] = defaultdict(list)
    statement = (
        select(ReplicaRow)
        .join(JobRow, (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt))
        .where(ReplicaRow.job_id.in_(placed))
        .order_by(ReplicaRow.id)
    )
    for replica in (await session.execute(statement)).scalars() if placed else ():
        found[replica.job_id].append(replica)
    return [_job_view(row, found[row.id], live.get(row.id)) for row in rows]


def new_job_view(row: JobRow) -> api.Job:
    """Show a job that was made just now: it has no replicas and no figures."""
    return _job_view(row, [], None)


async def node_views(session: AsyncSession, rows: Iterable[NodeRow]) -> list[api.Node]:
    """Show nodes with the CPUs that replicas hold on them."""
    statement = (
        select(ReplicaRow.node_id, func.sum(ReplicaRow.cpus))
        .where(ReplicaRow.state.in_(_BUSY))
        .group_by(ReplicaRow.node_id)
    )
    used = {node_id: int(cpus) for node_id, cpus in await session.execute(statement)}
    return [
        api.Node(
            id=row.id,
            name=row.name,
            host=row.host,
            state=NodeState(row.state),
            cpus=row.cpus,
            gpus=row.gpus,
            memory_bytes=row.memory_bytes,
            cpus_used=used.get(row.id, 0),
            last_seen_at=row.last_seen_at,
            version=row.agent_version,
            findings=[api.NodeFinding.model_validate(found) for found in row.findings],
        )
        for row in rows
    ]


def _job_view(row: JobRow, replicas: Sequence[ReplicaRow], now: LiveJob | None) -> api.Job:
    progress = now.progress if now is not None and now.progress is not None else row.progress
    ended = row.finished_at is not None
    return api.Job.model_validate(
        {
            "id": row.id,
            "name": row.name,
            "kind": row.kind,
            "state": row.state,
            "reason": row.reason,
            "reason_detail": row.reason_detail,
            "spec": row.spec,
            "epoch": row.epoch,
            "attempt": row.attempt,
            "restarts": row.restarts,
            "restarts_left": max(0, row.spec.get("restart", {}).get("max_restarts", 0) - row.restarts),
            "next_attempt_at": row.next_attempt_at if row.state == JobState.RECOVERING else None,
            "created_at": row.created_at,
            "started_at": row.started_at,
            "finished_at": row.finished_at,
            "progress": progress,
            "eta_s": None if ended else (now.eta_s if now is not None else row.eta_s),
            "latest": {**row.latest, **(now.latest if now is not None else {})},
            "why": row.why,
            "replicas": [replica_view(r) for r in replicas],
            "version": row.version,
        }
    )
