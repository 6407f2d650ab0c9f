"""What is wanted of a node: the agent's `desired` message, made from the rows each time. Reads only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.agent import CheckpointOrder, Desired, DesiredSet, LimitsOrder, Preemption
from penstock.protocol.contract import CollectiveJob, PserverJob
from penstock.protocol.jobspec import JobSpec, memory_bytes
from penstock.protocol.states import ACTIVE_JOB, LIVE_REPLICA, JobState, ReplicaState, StopReason
from penstock_server.db import Database
from penstock_server.services import preemption
from penstock_server.services.addresses import Site, addresses
from penstock_server.services.backoff import Span, is_due, starts_at
from penstock_server.services.lifecycle import may_linger
from penstock_server.services.settle import facts_of
from penstock_server.tables import AttemptRow, JobRow, NodeRow, ReplicaRow

_PLACED = [s.value for s in ACTIVE_JOB if s not in (JobState.CREATED, JobState.QUEUED)]
_GROUPED = ("pserver", "collective")


@dataclass(frozen=True, slots=True)
class _Group:
    """The attempt of a job whose processes talk to each other. `trainers`, `servers`: the newest ones, by index.

    `addresses`: of its nodes; `starts_at`: of its newest processes.
    """

    trainers: list[ReplicaRow]
    servers: list[ReplicaRow]
    secret: str
    addresses: dict[str, str]
    starts_at: dict[str, datetime]


@dataclass(frozen=True, slots=True)
class Orders:
    """An agent's `desired` message. `again_at`: when it changes though nothing happens, None if it does not."""

    message: DesiredSet
    again_at: datetime | None


async def desired(
    database: Database, node_id: str, *, without: Collection[str], released: Collection[str], now: datetime
) -> Orders:
    """Return the `desired` message for the agent of a node.

    A replica is wanted while its job starts or runs, its attempt is the job's, and it has not ended; a pserver also for
    a while after its trainers are done, until it is `released`. One in the place of others that failed soon after each
    other is wanted a moment later. `without`: replicas whose agent lost them; they are never started a second time.
    `keep_state` of the message: jobs that go on, whose pservers' state and checkpoints on the node are not to be
    removed. `preempted`: trainers that are asked to save and to end (`preemption.has_notice`); their pservers stay.
    """
    statement = (
        select(ReplicaRow, JobRow)
        .join(JobRow, JobRow.id == ReplicaRow.job_id)
        .where(
            ReplicaRow.node_id == node_id,
            ReplicaRow.state.in_(LIVE_REPLICA),
            ReplicaRow.attempt == JobRow.attempt,
            JobRow.state.in_([JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.RECOVERING]),
        )
        .order_by(ReplicaRow.id)
    )
    # By the jobs that go on, not by the node's index, which leads to every replica that the node ever had: there
    # `coalesce` leaves no index, and a database without statistics no other choice.
    kept = (
        select(ReplicaRow.job_id)
        .join(JobRow, JobRow.id == ReplicaRow.job_id)
        .where(func.coalesce(ReplicaRow.node_id, "") == node_id, JobRow.state.in_(_PLACED))
        .distinct()
    )
    async with database.read() as session:
        pairs: Sequence[Any] = (await session.execute(statement)).all()
        notices = await _notices(session, {job.id: job for _, job in pairs}, now)
        serving = {r.id for r, job in pairs if job.id in notices and r.role == "pserver"}
        is_wanted = partial(_is_wanted, released=released, serving=serving)
        wanted = [(r, job) for r, job in pairs if r.id not in without and is_wanted(r, job)]
        jobs = {job.id: job for _, job in wanted}
        groups = await _groups(session, [job.id for job in jobs.values() if job.spec.get("mode") in _GROUPED])
        keep = (await session.execute(kept)).scalars().all()
    specs = {job.id: JobSpec.model_validate(job.spec) for job in jobs.values()}
    pauses = {r.id: _pause_end(r, groups.get(job.id)) for r, job in wanted}
    later = {id: at for id, at in pauses.items() if at is not None and not is_due(at, now)}
    orders = [_order(r, specs[job.id], groups.get(job.id)) for r, job in wanted if r.id not in later]
    # Each field is given: pydantic reads a default factory's signature from its source text, each time.
    preempted = {r.id: notices[job.id] for r, job in pairs if job.id in notices and r.id not in serving}
    message = DesiredSet.model_construct(replicas=orders, refused=[], keep_state=sorted(keep), preempted=preempted)
    return Orders(message, min(later.values(), default=None))


def _is_wanted(replica: ReplicaRow, job: JobRow, *, released: Collection[str], serving: Collection[str]) -> bool:
    if JobState(job.state) is JobState.RECOVERING:
        return replica.id in serving
    if JobState(job.state) is not JobState.STOPPING:
        return True
    return may_linger(JobState.STOPPING, job.reason, replica.role) and replica.id not in released


async def _notices(session: AsyncSession, jobs: Mapping[str, JobRow], now: datetime) -> dict[str, Preemption]:
    """Return the notices of the jobs that have one. No statement if none of them is preempted."""
    found = {id: preemption.grace_s(job.spec) for id, job in jobs.items() if job.reason == StopReason.PREEMPTED}
    graces = {job_id: grace_s for job_id, grace_s in found.items() if grace_s > 0}
    if not graces:
        return {}
    is_current = (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt)
    statement = select(ReplicaRow).join(JobRow, is_current).where(ReplicaRow.job_id.in_(graces))
    members = defaultdict[str, list[ReplicaRow]](list)
    for row in (await session.execute(statement.order_by(ReplicaRow.stream))).scalars():
        members[row.job_id].append(row)
    return {
        job_id: Preemption(why=jobs[job_id].reason_detail, grace_s=grace_s)
        for job_id, grace_s in graces.items()
        if preemption.has_notice(facts_of(jobs[job_id], members[job_id], {}, now))
    }


def _pause_end(replica: ReplicaRow, group: _Group | None) -> datetime | None:
    """Return until when a replica that has not started waits, if it waits at all."""
    if group is None or replica.state != ReplicaState.ASSIGNED:
        return None
    at = group.starts_at.get(replica.id, replica.created_at)
    return at if at > replica.created_at else None


async def _groups(session: AsyncSession, job_ids: Collection[str]) -> dict[str, _Group]:
    """Return the current attempts of these jobs. Two statements, however many jobs and replicas there are."""
    if not job_ids:
        return {}
    is_current = (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt)
    members = (
        select(ReplicaRow, NodeRow)
        .join(JobRow, is_current)
        .join(NodeRow, NodeRow.id == ReplicaRow.node_id)
        .where(ReplicaRow.job_id.in_(job_ids))
        .order_by(ReplicaRow.stream)
    )
    found: dict[str, dict[tuple[str, int], list[ReplicaRow]]] = defaultdict(lambda: defaultdict(list))
    sites: dict[str, dict[str, Site]] = defaultdict(dict)
    for replica, node in await session.execute(members):
        found[replica.job_id][replica.role, replica.index].append(replica)
        sites[replica.job_id][node.id] = Site(node.id, node.host, node.address)
    secrets = (
        select(AttemptRow.job_id, AttemptRow.secret)
        .join(JobRow, (JobRow.id == AttemptRow.job_id) & (JobRow.attempt == AttemptRow.number))
        .where(AttemptRow.job_id.in_(job_ids))
    )
    return {
        job_id: _group(found[job_id], secret, addresses(list(sites[job_id].values())))
        for job_id, secret in await session.execute(secrets)
    }


def _group(places: Mapping[tuple[str, int], Sequence[ReplicaRow]], secret: str, where: dict[str, str]) -> _Group:
    """Put a group together. `places`: the processes of each role and index, oldest first."""
    newest = [(role, rows[-1]) for (role, _), rows in sorted(places.items())]
    return _Group(
        trainers=[row for role, row in newest if role == "trainer"],
        servers=[row for role, row in newest if role == "pserver"],
        secret=secret,
        addresses=where,
        starts_at={
            rows[-1].id: starts_at([Span(one.created_at, one.finished_at) for one in rows[:-1]], rows[-1].created_at)
            for rows in places.values()
        },
    )


def _order(replica: ReplicaRow, spec: JobSpec, group: _Group | None) -> Desired:
    """Return the order of one replica, unchecked: what an agent cannot read it refuses, and the rest is not held up."""
    order = Desired.model_construct(
        replica_id=replica.id,
        job_id=replica.job_id,
        job_name=spec.name,
        role="trainer" if replica.role == "trainer" else "pserver",
        index=replica.index,
        epoch=replica.epoch,
        attempt=replica.attempt,
        stream=replica.stream,
        entrypoint=spec.entrypoint,
        env=spec.env,
        snapshot=spec.snapshot,
        cpus=replica.cpus,
        stop_grace_s=spec.stop_grace_s,
        on_disconnect=spec.on_disconnect,
        checkpoint=None if spec.checkpoint is None else CheckpointOrder(**spec.checkpoint.model_dump()),
        limits=_limits(spec),
    )
    if group is None or replica.node_id is None:
        return order
    if spec.mode == "collective":
        return order.model_copy(update={"collective_job": _collective_job(replica, group.trainers)})
    pserver_job = PserverJob(
        endpoints=_endpoints(group.servers),
        num_trainers=len(group.trainers),
        token=group.secret,
        address=group.addresses[replica.node_id],
        port=replica.port,
    )
    return order.model_copy(update={"pserver_job": pserver_job})


def _limits(spec: JobSpec) -> LimitsOrder | None:
    asked = spec.limits
    if asked is None:
        return None
    memory = None if asked.memory is None else memory_bytes(asked.memory)
    return LimitsOrder(memory_bytes=memory, processes=asked.processes, open_files=asked.open_files, cpus=asked.cpus)


def _collective_job(replica: ReplicaRow, ranks: Sequence[ReplicaRow]) -> CollectiveJob:
    """Return a rank's place among the others. Its GPUs come after those of the ranks before it on its node."""
    endpoints = _endpoints(ranks)
    beside = [rank for rank in ranks if rank.node_id == replica.node_id]
    local_rank = [rank.index for rank in beside].index(replica.index)
    first_gpu = sum(rank.gpus for rank in beside[:local_rank])
    return CollectiveJob(
        endpoints=endpoints,
        master=f"{endpoints[0].rpartition(':')[0]}:{ranks[0].meeting_port}",
        local_rank=local_rank,
        num_local=len(beside),
        node=list(dict.fromkeys(rank.node_id for rank in ranks)).index(replica.node_id),
        gpus=tuple(range(first_gpu, first_gpu + replica.gpus)),
        ports=tuple(port for port in (replica.port, replica.meeting_port) if port is not None),
    )


def _endpoints(rows: Sequence[ReplicaRow]) -> tuple[str, ...]:
    return tuple(row.endpoint or "" for row in rows)
