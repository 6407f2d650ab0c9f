"""Rows as the API shows them. What the telemetry knows and the row does not yet comes from `live`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.agent import DiskSpace
from penstock.protocol.clocks import ClockOffset
from penstock.protocol.environment import is_secret
from penstock.protocol.masking import MASK
from penstock.protocol.states import LIVE_REPLICA, JobState, NodeState
from penstock_server.auth.principal import Principal
from penstock_server.diskspace import free_of, is_full
from penstock_server.schemas import api
from penstock_server.secrecy import SEES_ENV
from penstock_server.services import budget
from penstock_server.streams.agents import Agents
from penstock_server.streams.live import Live, LiveJob
from penstock_server.tables import EventRow, JobRow, NodeRow, ReplicaRow

NODES = 20
"""Nodes that are shown in one turn of the event loop: some 3 ms."""


def columns(model: type[BaseModel], row: object) -> dict[str, Any]:
    """Return the model's fields that a row has by the same names."""
    return {name: getattr(row, name) for name in model.model_fields if hasattr(row, name)}


def replica_view(row: ReplicaRow) -> api.Replica:
    """Show a replica."""
    return api.Replica(**columns(api.Replica, row))


def event_view(row: EventRow) -> api.Event:
    """Show an event."""
    return api.Event.model_validate({**columns(api.Event, row), "from": row.from_state, "to": row.to_state})


async def job_views(session: AsyncSession, rows: Sequence[JobRow], live: Live, at: datetime) -> list[api.Job]:
    """Show jobs, as they are at `at`, with the replicas of their current attempts. One query for all replicas."""
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
    return [_job_view(row, found[row.id], live.get(row.id), at) for row in rows]


def new_job_view(row: JobRow) -> api.Job:
    """Show a job that was made just now: it has no replicas and no figures."""
    return _job_view(row, [], None, row.created_at)


async def node_views(session: AsyncSession, rows: Iterable[NodeRow], agents: Agents, at: datetime) -> list[api.Node]:
    """Show nodes, as they are at `at`, with the replicas on them, and the CPUs that those hold.

    The event loop turns between pieces.
    """
    statement = (
        select(ReplicaRow.node_id, func.sum(ReplicaRow.cpus), func.count())
        .where(ReplicaRow.state.in_(LIVE_REPLICA))
        .group_by(ReplicaRow.node_id)
    )
    used = {node_id: (int(cpus), count) for node_id, cpus, count in await session.execute(statement)}
    shown = []
    for number, row in enumerate(rows, 1):
        shown.append(_node_view(row, used.get(row.id, (0, 0)), agents, at))
        if number % NODES == 0:
            await asyncio.sleep(0)
    return shown


def _node_view(row: NodeRow, used: tuple[int, int], agents: Agents, at: datetime) -> api.Node:
    cpus, num_replicas = used
    drain_by = row.drain_by if row.state == NodeState.DRAINING else None
    return api.Node.model_validate(
        {
            **columns(api.Node, row),
            "cpus_used": cpus,
            "replicas": num_replicas,
            "version": row.agent_version,
            "etag": str(row.version),
            "clock": _clock_view(agents.clock_of(row.id)),
            "findings": [*row.findings, *_disk_findings(agents.disk_of(row.id))],
            "drain_by": drain_by,
            "drain_left_s": None if drain_by is None else max(0.0, (drain_by - at).total_seconds()),
        }
    )


def _disk_findings(disk: DiskSpace | None) -> list[dict[str, str]]:
    """Return what is wrong with a node's disk, as its last heartbeat says."""
    if disk is None or not is_full(disk):
        return []
    detail = (
        f"the disk of the agent's state folder is full: {free_of(disk)}. Replicas on the node go on, but their logs, "
        "checkpoints and spooled telemetry do not fit; no new job starts there"
    )
    return [{"name": "disk", "level": "error", "detail": detail, "advice": "Free disk space on the node"}]


def _clock_view(offset: ClockOffset | None) -> api.NodeClock | None:
    if offset is None:
        return None
    return api.NodeClock(offset_ms=offset.offset_ns / 1e6, error_ms=offset.error_ns / 1e6)


def for_reader(job: api.Job, asker: Principal) -> api.Job:
    """Return a job as its reader may see it: the values of `env` are for those who may submit jobs."""
    if asker.may_in(job.spec.project, SEES_ENV):
        return job
    return job.model_copy(update={"spec": job.spec.model_copy(update={"env": dict.fromkeys(job.spec.env, MASK)})})


def _job_view(row: JobRow, replicas: Sequence[ReplicaRow], now: LiveJob | None, at: datetime) -> api.Job:
    # What looks like a secret is not given back, even to who sent it: it is for the job alone.
    env = {name: MASK if is_secret(name, value) else value for name, value in row.spec.get("env", {}).items()}
    progress = now.progress if now is not None and now.progress is not None else row.progress
    ended = row.finished_at is not None
    return api.Job.model_validate(
        {
            **columns(api.Job, row),
            "spec": {**row.spec, "env": env},
            **_restarts_left(row, at),
            "next_attempt_at": row.next_attempt_at if row.state == JobState.RECOVERING else None,
            "progress": progress,
            "eta_s": None if ended else (now.eta_s if now is not None else row.eta_s),
            "latest": {**row.latest, **(now.latest if now is not None else {})},
            "replicas": [replica_view(r) for r in replicas],
        }
    )


def _restarts_left(row: JobRow, at: datetime) -> dict[str, Any]:
    restart = row.spec.get("restart", {})
    own = budget.own(restart, row.restarts_by_class, at)
    shared = budget.shared(restart, row.restarts, row.restarted_at, row.restarts_by_class, at)
    is_shared = not own or any(one not in own for one in restart.get("on", []))  # by some class of failures
    return {
        "restarts_left": shared.left if is_shared else 0,
        "restarts_left_by_class": {name: one.left for name, one in own.items()},
    }
