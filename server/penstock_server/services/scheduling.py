"""Place queued jobs on nodes: a thin shell around `placement` and `fairness`.

A pass reads and decides while others write: it takes the lock of writes only to start a few jobs at a time, whose
placements are looked at again then (`starting`), and to write why others wait, some at a time (`lines`). What stands no
longer ends the pass, and another begins.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import func, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.jobspec import JobSpec, Resources, memory_bytes
from penstock.protocol.states import JobState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.services.fairness import Head, Line, Turns, behind_quota, capacity_of
from penstock_server.services.lines import Lines, explain, not_before
from penstock_server.services.pilots import Stay, bound, place_job
from penstock_server.services.placement import BEHIND, Amounts, Chosen, Need, Room, Waits, take
from penstock_server.services.starting import Basis, Placement, start
from penstock_server.services.survey import nowhere, rooms_of, stays_of, terms, uses
from penstock_server.streams.agents import Agents
from penstock_server.tables import JobRow

JOBS_AT_ONCE = 4
REPLICAS_AT_ONCE = 32
"""What one transaction starts at most, but for a job that is larger by itself: some 10 ms, for which others wait."""
PASSES = 3
"""Passes after each other, each because what the one before had read had changed; the next comes with the clock."""


@dataclass(slots=True)
class _Survey:
    """What a pass has read, and what it has decided since. `placed`: not yet written."""

    now: datetime
    rooms: list[Room]
    absent: list[str]
    stays: dict[str, Stay]
    basis: Basis
    lines: Lines
    turns: Turns
    placed: list[Placement] = field(default_factory=list)
    num_started: int = 0


class _Stale(Exception):
    """What a pass had read has changed since."""


class Scheduling:
    """Places jobs on nodes whose agents are connected. Whose turn it is in a pass, `fairness` decides."""

    def __init__(self, database: Database, clock: Clock, agents: Agents) -> None:
        self._db, self._clock, self._agents = database, clock, agents
        self._again_at: datetime | None = None
        self._alone = asyncio.Lock()  # the room that a pass has read is taken by no other
        self._behind: set[tuple[str, int]] = set()  # (project, priority) of jobs that wait by what `line` says
        self.line = Line()

    async def run(self) -> int:
        """Place what fits; return how many jobs were placed. All or nothing for each job.

        Jobs behind one that waits for room are not even loaded: they only learn whom they wait for.
        """
        async with self._alone:
            num_started = 0
            for _ in range(PASSES):
                started, is_final = await self._pass()
                num_started += started
                if is_final:
                    return num_started
            self._again_at = self._clock.now()
            return num_started

    async def _pass(self) -> tuple[int, bool]:
        """Return how many jobs were started, and whether no other pass has to follow at once."""
        self._again_at = await self._next_pause_ends(self._clock.now())
        behind, self._behind = self._behind, set()
        try:
            started, line = await self._attempt()
        except BaseException:
            self._behind |= behind
            raise
        if line is None:
            self._behind |= behind
            self.line = Line()
            return started, False
        self.line = line
        return started, all(line.why(*one) is not None for one in behind | self._behind)

    async def _attempt(self) -> tuple[int, Line | None]:
        """Return how many jobs were started, and why others wait: None if what was read has changed meanwhile."""
        if not await self._any_waiting():
            return 0, Line()
        survey = await self._look(self._clock.now())
        if not survey.rooms:
            line = Line(everyone=nowhere(survey.absent))
            await explain(self._db, survey.now, line.everyone, true())
            return 0, line
        try:
            line = await self._place(survey)
            await self._start(survey)
        except _Stale:
            return survey.num_started, None
        if line.blocked is not None:
            for head in survey.turns.left():
                await explain(self._db, survey.now, line.blocked[1], not_before(head))
        return survey.num_started, line

    async def _look(self, now: datetime) -> _Survey:
        """Read what decisions rest on. Connections first: one that is replaced while it is read is not the same."""
        links = {link.node_id: link for link in self._agents.all()}
        lines = Lines(self._db, now)
        async with self._db.read() as session:
            rooms, absent = await rooms_of(session, self._agents)
            stays = await self.stays(session)
            given = await terms(session)
            turns = Turns(await lines.open(session), await uses(session), given, capacity_of(rooms))
        basis = Basis({room.node_id: room for room in rooms}, links, given)
        return _Survey(now, rooms, absent, stays, basis, lines, turns)

    async def _place(self, survey: _Survey) -> Line:
        """Decide on one job after another, and start some at a time."""
        turns, held = survey.turns, dict[str, tuple[int, str]]()
        while (head := turns.next()) is not None:
            await asyncio.sleep(0)  # others have their turn of the event loop
            job = survey.lines.first(head.project)
            spec = JobSpec.model_validate(job.spec)
            needs = needs_of(spec)
            quota = turns.over_quota(head.project, needs)
            answer = quota or place_job(needs, survey.rooms, survey.stays, head.job_id, spec.max_duration_s)
            if isinstance(answer, Chosen):
                await self._take(survey, Placement(job, spec, needs, answer))
            elif answer.why != job.why:
                await explain(self._db, survey.now, answer.why, JobRow.id == head.job_id)
            following = await survey.lines.follow(head.project)
            if quota is not None and not quota.forever:
                held[head.project] = head.priority, behind_quota(head.project)
                await self._explain_behind(survey, held[head.project][1], following)
                following = None
            turns.follow(head.project, following)
            if quota is None and isinstance(answer, Waits) and not answer.forever:
                return Line(blocked=(head, BEHIND), held=held, burdens=turns.burdens())
        return Line(held=held, burdens=turns.burdens())

    async def _explain_behind(self, survey: _Survey, why: str, head: Head | None) -> None:
        """Say of a job and of all that come after it in its project why they wait."""
        if head is not None:
            await explain(self._db, survey.now, why, not_before(head))

    async def _take(self, survey: _Survey, placement: Placement) -> None:
        """Note a placement; start what was placed once it is enough for a transaction."""
        survey.stays = bound(survey.stays, placement.chosen, placement.job.head.job_id)
        survey.rooms = take(survey.rooms, placement.needs, placement.chosen)
        survey.turns.place(placement.job.head.project, placement.needs)
        survey.placed.append(placement)
        num_replicas = sum(len(one.needs) for one in survey.placed)
        if len(survey.placed) >= JOBS_AT_ONCE or num_replicas >= REPLICAS_AT_ONCE:
            await self._start(survey)

    async def _start(self, survey: _Survey) -> None:
        """Start what was placed. Raises _Stale if not all of it stands."""
        placed, survey.placed = survey.placed, []
        if not placed:
            return
        async with self._db.write() as tx:
            num_started = await start(tx, placed, survey.basis, self._agents, survey.now)
        survey.num_started += num_started
        if num_started < len(placed):
            raise _Stale

    def waits(self, project: str, priority: int) -> str | None:
        """Return why a job that is submitted now waits, or None if a pass has to look at it.

        A pass that runs just now may not see the job: if it ends with another answer, it is followed by another.
        """
        why = self.line.why(project, priority)
        if why is not None:
            self._behind.add((project, priority))
        return why

    def look_at_clock(self) -> bool:
        """Return whether a job's pause has ended since the last pass."""
        return self._again_at is not None and self._again_at <= self._clock.now()

    async def stays(self, session: AsyncSession) -> dict[str, Stay]:
        """Return how long the pilots that are connected stay. Other nodes are not in it."""
        return await stays_of(session, self._agents.all(), self._clock.monotonic())

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
