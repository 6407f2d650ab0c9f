"""What is wanted of a node: the agent's `desired` message, made from the rows each time. Reads only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import TERMINAL_JOB, TERMINAL_REPLICA, JobState, ReplicaState
from penstock_server.db import Database
from penstock_server.services.addresses import Site, addresses
from penstock_server.services.lifecycle import may_linger
from penstock_server.tables import AttemptRow, JobRow, NodeRow, ReplicaRow

_BUSY = [s.value for s in ReplicaState if s not in TERMINAL_REPLICA]
_OVER = [s.value for s in TERMINAL_JOB]


@dataclass(frozen=True, slots=True)
class _Group:
    """The attempt of a job with parameter servers. `addresses`: of its nodes."""

    endpoints: list[str]
    num_trainers: int
    secret: str
    addresses: dict[str, str]


async def desired(
    database: Database, node_id: str, *, without: Collection[str], lingers_since: datetime
) -> dict[str, Any]:
    """Return the agent's `desired` message.

    A replica is wanted while its job starts or runs, its attempt is the job's, and it has not ended; a pserver also for
    a while after its trainers are done, if that was after `lingers_since`. `without`: replicas whose agent lost them;
    they are never started a second time. `keep_state`: jobs that go on, whose pservers' state on the node is not to be
    removed.
    """
    statement = (
        select(ReplicaRow, JobRow)
        .join(JobRow, JobRow.id == ReplicaRow.job_id)
        .where(
            ReplicaRow.node_id == node_id,
            ReplicaRow.state.in_(_BUSY),
            ReplicaRow.attempt == JobRow.attempt,
            JobRow.state.in_([JobState.STARTING, JobState.RUNNING, JobState.STOPPING]),
        )
        .order_by(ReplicaRow.id)
    )
    kept = (
        select(ReplicaRow.job_id)
        .join(JobRow, JobRow.id == ReplicaRow.job_id)
        .where(ReplicaRow.node_id == node_id, ReplicaRow.role == "pserver", JobRow.state.not_in(_OVER))
        .distinct()
    )
    async with database.read() as session:
        pairs: Sequence[Any] = (await session.execute(statement)).all()
        wanted = [(r, job) for r, job in pairs if r.id not in without and _is_wanted(r, job, lingers_since)]
        jobs = {job.id: job for _, job in wanted}
        groups = await _groups(session, [job.id for job in jobs.values() if job.spec.get("mode") == "pserver"])
        keep = (await session.execute(kept)).scalars().all()
    specs = {job.id: JobSpec.model_validate(job.spec) for job in jobs.values()}
    orders = [_order(replica, specs[job.id], groups.get(job.id)) for replica, job in wanted]
    return {"type": "desired", "replicas": orders, "keep_state": sorted(keep)}


def _is_wanted(replica: ReplicaRow, job: JobRow, lingers_since: datetime) -> bool:
    if JobState(job.state) is not JobState.STOPPING:
        return True
    return may_linger(JobState.STOPPING, job.reason, replica.role) and job.state_at > lingers_since


async def _groups(session: AsyncSession, job_ids: Collection[str]) -> dict[str, _Group]:
    """Return the current attempts of these jobs. Two statements, however many jobs and replicas there are."""
    if not job_ids:
        return {}
    is_current = (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt)
    members = (
        select(ReplicaRow.job_id, ReplicaRow.role, ReplicaRow.index, ReplicaRow.endpoint, NodeRow)
        .join(JobRow, is_current)
        .join(NodeRow, NodeRow.id == ReplicaRow.node_id)
        .where(ReplicaRow.job_id.in_(job_ids))
        .order_by(ReplicaRow.stream)
    )
    found: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    sites: dict[str, dict[str, Site]] = defaultdict(dict)
    for job_id, role, index, endpoint, node in await session.execute(members):
        found[job_id][role].setdefault(index, endpoint or "")
        sites[job_id][node.id] = Site(node.id, node.host, node.address)
    secrets = (
        select(AttemptRow.job_id, AttemptRow.secret)
        .join(JobRow, (JobRow.id == AttemptRow.job_id) & (JobRow.attempt == AttemptRow.number))
        .where(AttemptRow.job_id.in_(job_ids))
    )
    return {
        job_id: _Group(
            endpoints=[endpoint for _, endpoint in sorted(found[job_id]["pserver"].items())],
            num_trainers=len(found[job_id]["trainer"]),
            secret=secret,
            addresses=addresses(list(sites[job_id].values())),
        )
        for job_id, secret in await session.execute(secrets)
    }


def _order(replica: ReplicaRow, spec: JobSpec, group: _Group | None) -> dict[str, Any]:
    order = {
        "replica_id": replica.id,
        "job_id": replica.job_id,
        "job_name": spec.name,
        "role": replica.role,
        "index": replica.index,
        "epoch": replica.epoch,
        "attempt": replica.attempt,
        "stream": replica.stream,
        "entrypoint": spec.entrypoint,
        "env": spec.env,
        "snapshot": spec.snapshot,
        "cpus": replica.cpus,
        "stop_grace_s": spec.stop_grace_s,
    }
    if group is None or replica.node_id is None:
        return order
    told = {"endpoints": group.endpoints, "num_trainers": group.num_trainers, "token": group.secret}
    return {**order, "pserver_job": {**told, "address": group.addresses[replica.node_id], "port": replica.port}}
