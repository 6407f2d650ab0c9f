"""Place queued jobs on nodes: a thin shell around `placement` and `fairness`.

A pass reads and decides while others write: it takes the lock of writes only to start a few jobs at a time, whose
placements are looked at again then (`starting`), and to write why others wait, some at a time (`lines`). A node or
terms that have changed end the pass, and another begins. So does a wake, once the pass has lasted for a second.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from sqlalchemy import func, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.jobspec import JobSpec, Resources, memory_bytes
from penstock.protocol.states import JobState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.services.backfill import LOOKED_AT, behind_many, decide, usable
from penstock_server.services.fairness import Head, Line, Turns, behind_quota, capacity_of
from penstock_server.services.lines import Lines, Reasons, not_before
from penstock_server.services.pilots import Stay, bound
from penstock_server.services.placement import BEHIND, Amounts, Chosen, Need, Room, Waits, take
from penstock_server.services.starting import Basis, Placement, start
from penstock_server.services.survey import Absent, nowhere, rooms_of, stays_of, terms, uses
from penstock_server.streams.agents import Agents
from penstock_server.tables import JobRow

JOBS_AT_ONCE = 4
REPLICAS_AT_ONCE = 32
"""What one transaction starts at most, but for a job that is larger by itself: some 10 ms, for which others wait."""
PASSES = 3
"""Passes after each other, each because what the one before had read had changed; the next comes with the clock."""
LASTS_S = 1.0
"""A pass that was woken since it looked ends after so long; the one after it after twice as long, to get further."""


@dataclass(slots=True)
class _Survey:
    """What a pass has read, and what it has decided since. `placed`: not yet written.

    `reserved`: nodes, by the first job that waits for room and could use each; `waiting`: such jobs of each project.
    """

    now: datetime
    rooms: list[Room]
    absent: Absent
    stays: dict[str, Stay]
    basis: Basis
    lines: Lines
    reasons: Reasons
    check: Callable[[], None]
    turns: Turns
    placed: list[Placement] = field(default_factory=list)
    reserved: dict[str, Head] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)
    num_started: int = 0
    num_gone: int = 0

    def reserve(self, head: Head, node_ids: Iterable[str]) -> None:
        """Reserve nodes for a job that waits for room."""
        self.waiting[head.project] += 1
        for node_id in node_ids:
            self.reserved.setdefault(node_id, head)


class _Stale(Exception):
    """A pass ends early: what it had read has changed since, or the server stops."""


class Scheduling:
    """Places jobs on nodes whose agents are connected. Whose turn it is in a pass, `fairness` decides."""

    def __init__(self, database: Database, clock: Clock, agents: Agents) -> None:
        self._db, self._clock, self._agents = database, clock, agents
        self._again_at: datetime | None = None
        self._alone = asyncio.Lock()  # the room that a pass has read is taken by no other
        self._submitted: set[tuple[str, int, str]] = set()  # since the pass began: project, priority, why it waits
        self._is_woken = self._is_stopping = False
        self._lasts_s = LASTS_S
        self.on_wake: Callable[[], None] = lambda: None
        self.line = Line()

    def wake(self) -> None:
        """Have a pass follow soon: something has changed for jobs that wait."""
        self._is_woken = True
        self.on_wake()

    def stop(self) -> None:
        """Have the pass that runs end early, and none follow it."""
        self._is_stopping = True

    async def run(self) -> int:
        """Place what fits; return how many jobs were placed. All or nothing for each job.

        Jobs behind one that waits for room on every node are not even loaded: they only learn whom they wait for.
        """
        async with self._alone:
            num_started = 0
            for _ in range(PASSES):
                started, is_final = await self._pass()
                num_started += started
                if is_final or self._is_stopping:
                    return num_started
            self._again_at = self._clock.now()
            return num_started

    async def _pass(self) -> tuple[int, bool]:
        """Return how many jobs were started, and whether no other pass has to follow at once."""
        self._again_at = await self._next_pause_ends(self._clock.now())
        self._submitted, self._is_woken = set(), False
        if not await self._any_waiting():
            self.line = Line()
            return 0, self._agrees()
        survey = await self._look(self._clock.now())
        try:
            self.line = await self._act(survey)
        except _Stale:
            self.line, is_final = Line(), False
        else:
            self._lasts_s, is_final = LASTS_S, not survey.num_gone and self._agrees()
        await survey.reasons.write()
        return survey.num_started, is_final

    def _agrees(self) -> bool:
        """Return whether jobs that were submitted during the pass wait for what they say."""
        return all(self.line.why(project, priority) == why for project, priority, why in self._submitted)

    def _check(self, began_s: float) -> None:
        """Raise _Stale if the pass that began then has to end."""
        if self._is_stopping:
            raise _Stale
        if self._is_woken and self._clock.monotonic() - began_s >= self._lasts_s:
            self._lasts_s *= 2
            raise _Stale

    async def _act(self, survey: _Survey) -> Line:
        """Start what can be placed; return why others wait. Raises _Stale."""
        if not survey.rooms:
            line = Line(everyone=nowhere(survey.absent))
            await survey.reasons.of_all(line.everyone, true())
            return line
        line = await self._place(survey)
        await self._start(survey)
        if line.blocked is not None:
            for head in survey.turns.left():
                await survey.reasons.of_all(line.blocked[1], not_before(head))
        return line

    async def _look(self, now: datetime) -> _Survey:
        """Read what decisions rest on. Connections first: one that is replaced while it is read is not the same."""
        links = {link.node_id: link for link in self._agents.all()}
        lines, check = Lines(self._db, now), partial(self._check, self._clock.monotonic())
        async with self._db.read() as session:
            rooms, absent = await rooms_of(session, self._agents)
            stays = await self.stays(session)
            given = await terms(session)
            turns = Turns(await lines.open(session), await uses(session), given, capacity_of(rooms))
        basis = Basis({room.node_id: room for room in rooms}, links, given)
        reasons = Reasons(self._db, now, lines.newest, check)
        return _Survey(now, rooms, absent, stays, basis, lines, reasons, check, turns)

    async def _place(self, survey: _Survey) -> Line:
        """Decide on one job after another, and start some at a time."""
        turns, held = survey.turns, dict[str, tuple[int, str]]()
        while (head := turns.next()) is not None:
            await asyncio.sleep(0)  # others have their turn of the event loop
            survey.check()
            job = survey.lines.first(head.project)
            spec = JobSpec.model_validate(job.spec)
            needs = needs_of(spec)
            quota = turns.over_quota(head.project, needs)
            answer = quota or decide(needs, survey.rooms, survey.reserved.keys(), survey.stays, head.job_id, spec)
            if isinstance(answer, Chosen):
                await self._take(survey, Placement(job, spec, needs, answer))
            elif answer.why != job.why:
                await survey.reasons.add(head.job_id, answer.why)
            following = await survey.lines.follow(head.project)
            if quota is None and isinstance(answer, Waits) and not answer.forever:
                survey.reserve(head, usable(needs, survey.rooms, survey.stays, head.job_id, spec))
            text = self._held(survey, head, quota)
            if text:
                held[head.project] = head.priority, text
                if following is not None:
                    await survey.reasons.of_all(text, not_before(following))
                following = None
            turns.follow(head.project, following)
            if len(survey.reserved) == len(survey.rooms):
                return Line(blocked=(head, BEHIND), held=held, burdens=turns.burdens(), reserved=survey.reserved)
        return Line(held=held, burdens=turns.burdens(), reserved=survey.reserved)

    def _held(self, survey: _Survey, head: Head, quota: Waits | None) -> str:
        """Return why no more of a project is looked at in this pass, or ''."""
        if quota is not None:
            return "" if quota.forever else behind_quota(head.project)
        return behind_many(head.project) if survey.waiting[head.project] >= LOOKED_AT else ""

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
        """Start what was placed. Raises _Stale if nodes or terms have changed.

        The room of a job that is gone counts as taken in this pass, so that another has to follow.
        """
        placed, survey.placed = survey.placed, []
        if not placed:
            return
        async with self._db.write() as tx:
            now = self._clock.now()
            started = await start(tx, placed, survey.basis, self._agents, seen_at=survey.now, now=now)
        survey.num_started += started.num_jobs
        survey.num_gone += started.num_gone
        if started.is_stale:
            raise _Stale

    def waits(self, project: str, priority: int) -> str | None:
        """Return why a job that is submitted now waits, or None if a pass has to look at it."""
        return self.line.why(project, priority)

    def submitted(self, project: str, priority: int, why: str) -> None:
        """Note a job that has been committed with what `waits` returned, and see whether it is still so.

        A pass that runs just now may not see the job: if it ends with another answer, it is followed by another.
        """
        self._submitted.add((project, priority, why))
        if self.line.why(project, priority) != why:
            self.wake()

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
