"""Place queued jobs on nodes: a thin shell around `placement`."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, select, union_all, update

from penstock.protocol.jobspec import JobSpec, Resources, memory_bytes
from penstock.protocol.states import ACTIVE_JOB, LIVE_REPLICA, JobState, NodeState, ReplicaState
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx, next_numbers
from penstock_server.services.addresses import Site, addresses, endpoint
from penstock_server.services.pilots import Stay, bound, place_job
from penstock_server.services.placement import Amounts, Chosen, Need, Room, behind, disconnected, take
from penstock_server.services.transitions import created, transition
from penstock_server.streams.agents import Agents
from penstock_server.tables import AttemptRow, JobRow, NodeRow, ReplicaRow
from penstock_server.uuid7 import uuid7


def _waiting(now: datetime) -> ColumnElement[bool]:
    """Select jobs to be placed; those that recover, once nothing of the old attempt is left and their pause is over."""
    is_free = JobRow.id.not_in(select(ReplicaRow.job_id).where(ReplicaRow.state.in_(LIVE_REPLICA)))
    is_due = JobRow.next_attempt_at.is_(None) | (JobRow.next_attempt_at <= now)
    is_waiting = JobRow.state.in_([JobState.QUEUED, JobState.RECOVERING])  # the index; what follows is looked up
    return is_waiting & ((JobRow.state == JobState.QUEUED) | (is_due & is_free))


class Scheduling:
    """Places jobs on nodes whose agents are connected. One pass looks at every waiting job, in order of submission."""

    def __init__(self, database: Database, clock: Clock, agents: Agents) -> None:
        self._db, self._clock, self._agents = database, clock, agents
        self._again_at: datetime | None = None
        self.line: str | None = None
        """Why a job that is submitted now waits, if that is known without a look at it: others wait for room."""

    async def run(self) -> int:
        """Place what fits; return how many jobs were placed. All or nothing for each job.

        Jobs behind one that waits for room are not even loaded: they only learn whom they wait for.
        """
        now = self._clock.now()
        self._again_at = await self._next_pause_ends(now)
        if not await self._any_waiting():
            self.line = None
            return 0
        placed, line = 0, None
        async with self._db.write() as tx:
            rooms, absent = await _rooms(tx, self._agents)
            stays = await self._stays(tx)
            after = ""
            while (job := await self._next(tx, now, after)) is not None:
                after = job.id
                spec = JobSpec.model_validate(job.spec)
                needs = needs_of(spec)
                answer = place_job(needs, rooms, stays, job.id, spec.max_duration_s)
                if isinstance(answer, Chosen):
                    stays = bound(stays, answer, job.id)
                    rooms = take(rooms, needs, answer)
                    await _start(tx, job, needs, answer, spec.max_duration_s, now)
                    placed += 1
                    continue
                if not rooms:
                    why = disconnected(absent) if absent else answer.why
                    await self._explain(tx, now, why, JobRow.id >= job.id)
                    line = why
                    break
                await self._explain(tx, now, answer.why, JobRow.id == job.id)
                if not answer.forever:
                    line = behind(job.name)
                    await self._explain(tx, now, line, JobRow.id > job.id)
                    break
        self.line = line
        return placed

    def look_at_clock(self) -> bool:
        """Return whether a job's pause has ended since the last pass."""
        return self._again_at is not None and self._again_at <= self._clock.now()

    async def _stays(self, tx: Tx) -> dict[str, Stay]:
        """Return how long the pilots that are connected stay. Other nodes are not in it."""
        now = self._clock.monotonic()
        links = [link for link in self._agents.all() if link.once or link.ends_at is not None or link.leaving]
        of_one_job = [link.node_id for link in links if link.once]
        statement = select(ReplicaRow.node_id, JobRow.id).join(JobRow, JobRow.id == ReplicaRow.job_id)
        statement = statement.join(NodeRow, NodeRow.id == ReplicaRow.node_id).where(
            ReplicaRow.node_id.in_(of_one_job), ReplicaRow.created_at >= NodeRow.joined_at
        )
        found = await tx.session.execute(statement.distinct()) if of_one_job else ()
        jobs: dict[str, str] = {node_id: job_id for node_id, job_id in found if node_id is not None}
        return {
            link.node_id: Stay(
                None if link.ends_at is None else link.ends_at - now,
                link.once,
                bool(link.leaving),
                jobs.get(link.node_id),
            )
            for link in links
        }

    async def _next_pause_ends(self, now: datetime) -> datetime | None:
        statement = select(func.min(JobRow.next_attempt_at)).where(
            JobRow.state == JobState.RECOVERING, JobRow.next_attempt_at > now
        )
        async with self._db.glance() as session:
            return (await session.execute(statement)).scalar_one()

    async def _any_waiting(self) -> bool:
        statement = select(JobRow.id).where(JobRow.state.in_([JobState.QUEUED, JobState.RECOVERING])).limit(1)
        async with self._db.glance() as session:
            return (await session.execute(statement)).first() is not None

    async def _next(self, tx: Tx, now: datetime, after: str) -> JobRow | None:
        statement = (
            select(JobRow)
            .where(_waiting(now), JobRow.id > after)
            .order_by(JobRow.id)
            .limit(1)
            .with_for_update(key_share=True)
        )
        return (await tx.session.execute(statement)).scalar_one_or_none()

    async def _explain(self, tx: Tx, now: datetime, why: str, which: ColumnElement[bool]) -> None:
        statement = (
            update(JobRow)
            .where(_waiting(now), which, JobRow.why != why)
            .values(why=why, version=JobRow.version + 1)
            .returning(JobRow.id)
            .execution_options(synchronize_session=False)
        )
        tx.effects.jobs.update((await tx.session.execute(statement)).scalars())


def needs_of(spec: JobSpec) -> list[Need]:
    """Return what each replica of a job needs: trainers first, then pservers."""
    return [
        Need(role, index, _amounts(resources), num_ports=_num_ports(spec, role, index))
        for role, resources in (("trainer", spec.trainers), ("pserver", spec.pservers))
        for index in range(resources.count)
    ]


def _num_ports(spec: JobSpec, role: str, index: int) -> int:
    """Pservers listen, and the ranks of a collective job; the first one also at the port where torch's ranks meet."""
    if role == "pserver":
        return 1
    return 0 if spec.mode != "collective" else 1 + (index == 0)


def _amounts(resources: Resources) -> Amounts:
    return resources.cpus, resources.gpus, memory_bytes(resources.memory)


async def _rooms(tx: Tx, agents: Agents) -> tuple[list[Room], list[str]]:
    """Return the READY nodes whose agents are connected, and the names of those whose are not (yet)."""
    found = await tx.session.execute(select(NodeRow).where(NodeRow.state == NodeState.READY).order_by(NodeRow.id))
    ready = found.scalars().all()
    nodes = [node for node in ready if agents.get(node.id) is not None]
    absent = [node.name for node in ready if agents.get(node.id) is None]
    if not nodes:
        return [], absent
    used: dict[str | None, Amounts] = defaultdict(lambda: (0, 0, 0))
    sums = (func.sum(ReplicaRow.cpus), func.sum(ReplicaRow.gpus), func.sum(ReplicaRow.memory_bytes))
    statement = select(ReplicaRow.node_id, sums[0], sums[1], sums[2]).where(ReplicaRow.state.in_(LIVE_REPLICA))
    for node_id, cpus, gpus, memory in await tx.session.execute(statement.group_by(ReplicaRow.node_id)):
        used[node_id] = (int(cpus), int(gpus), int(memory))
    taken = await _ports_in_use(tx)
    rooms = []
    for node in nodes:
        total = (node.cpus, node.gpus, node.memory_bytes)
        mine = used[node.id]
        free = (total[0] - mine[0], total[1] - mine[1], total[2] - mine[2])
        ports = tuple(port for port in node.ports if (node.host, port) not in taken)
        rooms.append(Room(node.id, node.name, total, free, node.host, ports, tuple(node.ports)))
    return rooms, absent


async def _ports_in_use(tx: Tx) -> set[tuple[str, int]]:
    """Return (host, port) of every port that a job holds: while it goes on, also those of attempts before.

    So a pserver that is down finds its port free, and an attempt that failed because of a port gets another.
    """
    ports_of = (
        select(NodeRow.host, ReplicaRow.port, ReplicaRow.meeting_port)
        .join(NodeRow, NodeRow.id == ReplicaRow.node_id)
        .where(ReplicaRow.port.is_not(None))
    )
    live = ports_of.where(ReplicaRow.state.in_(LIVE_REPLICA))
    of_active_jobs = ports_of.where(ReplicaRow.job_id.in_(select(JobRow.id).where(JobRow.state.in_(ACTIVE_JOB))))
    found = await tx.session.execute(union_all(live, of_active_jobs))  # two indexes; one OR would be read by none
    return {(host, port) for host, *ports in found for port in ports if port is not None}


async def _start(
    tx: Tx, job: JobRow, needs: Sequence[Need], placed: Chosen, max_duration_s: float | None, now: datetime
) -> None:
    job.epoch += 1
    job.attempt += 1
    job.next_attempt_at = None
    job.ends_by = None if max_duration_s is None else now + timedelta(seconds=max_duration_s)
    job.reason = job.reason_detail = ""  # those of the attempt before stand in its row
    attempt = AttemptRow(
        id=uuid7(), job_id=job.id, number=job.attempt, epoch=job.epoch, created_at=now, secret=secrets.token_urlsafe(32)
    )
    tx.session.add(attempt)
    await tx.session.flush()
    chosen = await tx.session.execute(select(NodeRow).where(NodeRow.id.in_(set(placed.node_ids))))
    nodes = {node.id: node for node in chosen.scalars()}
    where = addresses([Site(node.id, node.host, node.address) for node in nodes.values()])
    first = await next_numbers(tx, "stream", len(needs))
    for offset, (need, node_id) in enumerate(zip(needs, placed.node_ids, strict=True)):
        port, meeting_port = (*placed.ports.get(offset, ()), None, None)[:2]
        row = ReplicaRow(
            id=uuid7(),
            job_id=job.id,
            attempt_id=attempt.id,
            epoch=job.epoch,
            attempt=job.attempt,
            role=need.role,
            index=need.index,
            state=ReplicaState.ASSIGNED.value,
            node_id=node_id,
            host=nodes[node_id].host,
            port=port,
            meeting_port=meeting_port,
            endpoint=None if port is None else endpoint(where[node_id], port),
            stream=first + offset,
            cpus=need.amounts[0],
            gpus=need.amounts[1],
            memory_bytes=need.amounts[2],
            created_at=now,
            state_at=now,
            reason="",
        )
        created(tx, row, at=now)
    transition(tx, job, JobState.STARTING, at=now)
    names = sorted({node.name for node in nodes.values()})
    places = f"node {names[0]!r}" if len(names) == 1 else f"{len(names)} nodes"
    job.why = f"starts {len(needs)} replica{'s' if len(needs) > 1 else ''} on {places}"
