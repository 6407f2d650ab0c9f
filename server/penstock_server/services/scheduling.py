"""Place queued jobs on nodes: a thin shell around `placement`."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, select, true, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.jobspec import JobSpec, Resources, memory_bytes
from penstock.protocol.states import ACTIVE_JOB, LIVE_REPLICA, JobState, NodeState, ReplicaState
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx, next_numbers
from penstock_server.services.addresses import Site, addresses, endpoint
from penstock_server.services.backoff import LONGEST_OF_ATTEMPTS
from penstock_server.services.fairness import Head, Line, Terms, Turns, Use, behind_quota, capacity_of
from penstock_server.services.pilots import Stay, bound, place_job
from penstock_server.services.placement import BEHIND, Amounts, Chosen, Need, Room, Waits, disconnected, place, take
from penstock_server.services.transitions import created, transition
from penstock_server.streams.agents import Agents
from penstock_server.tables import AttemptRow, JobRow, NodeRow, ProjectRow, ReplicaRow
from penstock_server.uuid7 import uuid7


def _waiting(now: datetime) -> ColumnElement[bool]:
    """Select jobs to be placed; those that recover, once nothing of the old attempt is left and their pause is over."""
    is_free = JobRow.id.not_in(select(ReplicaRow.job_id).where(ReplicaRow.state.in_(LIVE_REPLICA)))
    at = JobRow.next_attempt_at
    is_due = at.is_(None) | (at <= now) | (at > now + LONGEST_OF_ATTEMPTS)  # later than that: the clock was set back
    is_waiting = JobRow.state.in_([JobState.QUEUED, JobState.RECOVERING])  # the index; what follows is looked up
    return is_waiting & ((JobRow.state == JobState.QUEUED) | (is_due & is_free))


class Scheduling:
    """Places jobs on nodes whose agents are connected. Whose turn it is in a pass, `fairness` decides."""

    def __init__(self, database: Database, clock: Clock, agents: Agents) -> None:
        self._db, self._clock, self._agents = database, clock, agents
        self._again_at: datetime | None = None
        self.line = Line()

    async def run(self) -> int:
        """Place what fits; return how many jobs were placed. All or nothing for each job.

        Jobs behind one that waits for room are not even loaded: they only learn whom they wait for.
        """
        now = self._clock.now()
        self._again_at = await self._next_pause_ends(now)
        if not await self._any_waiting():
            self.line = Line()
            return 0
        async with self._db.write() as tx:
            rooms, absent = await rooms_of(tx.session, self._agents)
            if rooms:
                placed, line = await self._pass(tx, rooms, now)
            else:
                placed, line = 0, Line(everyone=nowhere(absent))
                await self._explain(tx, now, line.everyone, true())
        self.line = line
        return placed

    async def _pass(self, tx: Tx, rooms: list[Room], now: datetime) -> tuple[int, Line]:
        stays = await self.stays(tx.session)
        order = await self._turns(tx, rooms, now)
        placed, held = 0, {}
        while (head := order.next()) is not None:
            job = (
                await tx.session.execute(select(JobRow).where(JobRow.id == head.job_id).with_for_update(key_share=True))
            ).scalar_one()
            spec = JobSpec.model_validate(job.spec)
            needs = needs_of(spec)
            quota = order.over_quota(job.project, needs)
            answer = quota or place_job(needs, rooms, stays, job.id, spec.max_duration_s)
            if isinstance(answer, Chosen):
                stays, rooms = bound(stays, answer, job.id), take(rooms, needs, answer)
                await _start(tx, job, needs, answer, _ends_by(spec, now), now)
                order.place(job.project, needs)
                placed += 1
            else:
                await self._explain(tx, now, answer.why, JobRow.id == job.id)
            following = await self._head(tx.session, now, job.project, after=head)
            if quota is not None and not quota.forever:
                held[job.project] = job.priority, behind_quota(job.project)
                await self._explain_behind(tx, now, held[job.project][1], following)
                following = None
            order.follow(job.project, following)
            if quota is None and isinstance(answer, Waits) and not answer.forever:
                blocked = head, BEHIND
                for one in order.left():
                    await self._explain_behind(tx, now, blocked[1], one)
                return placed, Line(blocked=blocked, held=held, burdens=order.burdens())
        return placed, Line(held=held, burdens=order.burdens())

    async def _turns(self, tx: Tx, rooms: Sequence[Room], now: datetime) -> Turns:
        projects = (await tx.session.execute(select(JobRow.project).where(_waiting(now)).distinct())).scalars().all()
        heads = [await self._head(tx.session, now, project) for project in projects]
        found = [head for head in heads if head is not None]
        return Turns(found, await uses(tx.session), await terms(tx.session), capacity_of(rooms))

    async def _head(
        self, session: AsyncSession, now: datetime, project: str, *, after: Head | None = None
    ) -> Head | None:
        """Return the first job of a project that waits, or the first after another one."""
        statement = select(JobRow.priority, JobRow.id).where(_waiting(now), JobRow.project == project)
        if after is not None:
            statement = statement.where(_not_before(after), JobRow.id != after.job_id)
        found = (await session.execute(statement.order_by(JobRow.priority.desc(), JobRow.id).limit(1))).first()
        return None if found is None else Head(project, *found)

    async def _explain_behind(self, tx: Tx, now: datetime, why: str, head: Head | None) -> None:
        """Say of a job and of all that come after it in its project why they wait."""
        if head is not None:
            await self._explain(tx, now, why, (JobRow.project == head.project) & _not_before(head))

    def waits(self, project: str, priority: int) -> str | None:
        """Return why a job that is submitted now waits, or None if a pass has to look at it."""
        return self.line.why(project, priority)

    def look_at_clock(self) -> bool:
        """Return whether a job's pause has ended since the last pass."""
        return self._again_at is not None and self._again_at <= self._clock.now()

    async def stays(self, session: AsyncSession) -> dict[str, Stay]:
        """Return how long the pilots that are connected stay. Other nodes are not in it."""
        now = self._clock.monotonic()
        links = [link for link in self._agents.all() if link.once or link.ends_at is not None or link.leaving]
        of_one_job = [link.node_id for link in links if link.once]
        statement = select(ReplicaRow.node_id, JobRow.id).join(JobRow, JobRow.id == ReplicaRow.job_id)
        statement = statement.join(NodeRow, NodeRow.id == ReplicaRow.node_id).where(
            ReplicaRow.node_id.in_(of_one_job), ReplicaRow.created_at >= NodeRow.joined_at
        )
        found = await session.execute(statement.distinct()) if of_one_job else ()
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

    async def _explain(self, tx: Tx, now: datetime, why: str, which: ColumnElement[bool]) -> None:
        statement = (
            update(JobRow)
            .where(_waiting(now), which, JobRow.why != why)
            .values(why=why, version=JobRow.version + 1)
            .returning(JobRow.id)
            .execution_options(synchronize_session=False)
        )
        tx.effects.jobs.update((await tx.session.execute(statement)).scalars())


def _not_before(head: Head) -> ColumnElement[bool]:
    """Select a job and those after it in the line of its project."""
    is_same = (JobRow.priority == head.priority) & (JobRow.id >= head.job_id)
    return (JobRow.priority < head.priority) | is_same


def nowhere(absent: Sequence[str]) -> str:
    """Describe why no job is placed. `absent`: nodes that are READY, but not connected."""
    none = place((), ())
    assert isinstance(none, Waits)  # without a node
    return disconnected(absent) if absent else none.why


async def uses(session: AsyncSession) -> dict[str, Use]:
    """Return what each project holds."""
    sums = (func.sum(ReplicaRow.cpus), func.sum(ReplicaRow.gpus), func.sum(ReplicaRow.memory_bytes))
    statement = select(JobRow.project, *sums, func.count(ReplicaRow.job_id.distinct())).join(
        JobRow, JobRow.id == ReplicaRow.job_id
    )
    found = await session.execute(
        statement.where(ReplicaRow.state.in_(LIVE_REPLICA), JobRow.kind == "managed").group_by(JobRow.project)
    )
    return {project: Use((int(cpus), int(gpus), int(memory)), jobs) for project, cpus, gpus, memory, jobs in found}


async def terms(session: AsyncSession) -> dict[str, Terms]:
    """Return the terms of the projects that have some of their own."""
    rows = (await session.execute(select(ProjectRow))).scalars()
    return {row.name: Terms(row.share, row.max_cpus, row.max_gpus, row.max_jobs) for row in rows}


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


_ROOMS = select(  # columns: an object of each node would be most of what a pass takes
    NodeRow.id, NodeRow.name, NodeRow.host, NodeRow.cpus, NodeRow.gpus, NodeRow.memory_bytes, NodeRow.ports
)


async def rooms_of(session: AsyncSession, agents: Agents) -> tuple[list[Room], list[str]]:
    """Return the READY nodes whose agents are connected, and the names of those whose are not (yet)."""
    found = await session.execute(_ROOMS.where(NodeRow.state == NodeState.READY).order_by(NodeRow.id))
    ready = found.all()
    nodes = [node for node in ready if agents.get(node.id) is not None]
    absent = [node.name for node in ready if agents.get(node.id) is None]
    if not nodes:
        return [], absent
    used: dict[str | None, Amounts] = defaultdict(lambda: (0, 0, 0))
    sums = (func.sum(ReplicaRow.cpus), func.sum(ReplicaRow.gpus), func.sum(ReplicaRow.memory_bytes))
    statement = select(ReplicaRow.node_id, sums[0], sums[1], sums[2]).where(ReplicaRow.state.in_(LIVE_REPLICA))
    for node_id, cpus, gpus, memory in await session.execute(statement.group_by(ReplicaRow.node_id)):
        used[node_id] = (int(cpus), int(gpus), int(memory))
    taken = await _ports_in_use(session)
    rooms = []
    for node in nodes:
        total = (node.cpus, node.gpus, node.memory_bytes)
        mine = used[node.id]
        free = (total[0] - mine[0], total[1] - mine[1], total[2] - mine[2])
        ports = tuple(port for port in node.ports if (node.host, port) not in taken)
        rooms.append(Room(node.id, node.name, total, free, node.host, ports, tuple(node.ports)))
    return rooms, absent


async def _ports_in_use(session: AsyncSession) -> set[tuple[str, int]]:
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
    found = await session.execute(union_all(live, of_active_jobs))  # two indexes; one OR would be read by none
    return {(host, port) for host, *ports in found for port in ports if port is not None}


def _ends_by(spec: JobSpec, now: datetime) -> datetime | None:
    """Return when an attempt that starts now has taken too long."""
    return None if spec.max_duration_s is None else now + timedelta(seconds=spec.max_duration_s)


async def _start(
    tx: Tx, job: JobRow, needs: Sequence[Need], placed: Chosen, ends_by: datetime | None, now: datetime
) -> None:
    job.epoch += 1
    job.attempt += 1
    job.next_attempt_at = None
    job.ends_by = ends_by
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
