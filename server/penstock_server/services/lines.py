"""The jobs that wait, in the line of their project: read some at a time, with the reason for which each waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import LIVE_REPLICA, JobState
from penstock_server.db import Database, Tx
from penstock_server.services.backoff import LONGEST_OF_ATTEMPTS
from penstock_server.services.fairness import Head
from penstock_server.tables import JobRow, ReplicaRow

AHEAD = 8
"""Jobs of a line that are read at once."""
PIECE = 200
"""Jobs whose `why` one transaction writes: a few ms."""
TEXTS = 20
"""Different texts that one transaction writes: a statement for each."""


def waiting(now: datetime) -> ColumnElement[bool]:
    """Select jobs to be placed; those that recover, once nothing of the old attempt is left and their pause is over."""
    is_free = JobRow.id.not_in(select(ReplicaRow.job_id).where(ReplicaRow.state.in_(LIVE_REPLICA)))
    at = JobRow.next_attempt_at
    is_due = at.is_(None) | (at <= now) | (at > now + LONGEST_OF_ATTEMPTS)  # later than that: the clock was set back
    is_waiting = JobRow.state.in_([JobState.QUEUED, JobState.RECOVERING])  # the index; what follows is looked up
    return is_waiting & ((JobRow.state == JobState.QUEUED) | (is_due & is_free))


def not_before(head: Head) -> ColumnElement[bool]:
    """Select a job and those after it in the line of its project."""
    is_same = (JobRow.priority == head.priority) & (JobRow.id >= head.job_id)
    return (JobRow.project == head.project) & ((JobRow.priority < head.priority) | is_same)


def _not_after(newest: str) -> ColumnElement[bool]:
    """Select jobs up to one. An expression, so that SQLite chooses no index by it: it would sort all that wait."""
    return JobRow.id.concat("") <= newest


@dataclass(frozen=True, slots=True)
class Queued:
    """A job that waits, as it was read."""

    head: Head
    attempt: int
    why: str
    spec: dict[str, Any]


class Lines:
    """The lines of all projects at one time. What is submitted later, or with a higher priority, another pass sees.

    `newest`: the newest job of all when the lines were opened. Later ones have larger ids, since one process makes all
    of them, and goes on after those of the process before it (`succession`).
    """

    def __init__(self, database: Database, now: datetime) -> None:
        self._db, self._now = database, now
        self._read: dict[str, deque[Queued]] = {}
        self.newest = ""

    async def open(self, session: AsyncSession) -> list[Head]:
        """Return the first job of each project."""
        self.newest = (await session.execute(select(func.max(JobRow.id)))).scalar_one() or ""
        projects = await session.execute(select(JobRow.project).where(waiting(self._now)).distinct())
        for project in projects.scalars().all():
            found = await session.execute(self._next(JobRow.project == project))
            self._read[project] = deque(_queued(row) for row in found)
        return [jobs[0].head for jobs in self._read.values() if jobs]

    def first(self, project: str) -> Queued:
        """Return the first job of a line."""
        return self._read[project][0]

    async def follow(self, project: str) -> Head | None:
        """Take the first job from a line; return the next."""
        jobs = self._read[project]
        former = jobs.popleft().head
        if not jobs:
            async with self._db.glance() as session:
                found = await session.execute(self._next(not_before(former) & (JobRow.id != former.job_id)))
                jobs.extend(_queued(row) for row in found)
        return jobs[0].head if jobs else None

    def _next(self, which: ColumnElement[bool]) -> Select[Any]:
        columns = (JobRow.project, JobRow.priority, JobRow.id, JobRow.attempt, JobRow.why, JobRow.spec)
        seen = select(*columns).where(waiting(self._now), _not_after(self.newest), which)
        return seen.order_by(JobRow.priority.desc(), JobRow.id).limit(AHEAD)


def _queued(row: Any) -> Queued:
    return Queued(Head(row.project, row.priority, row.id), row.attempt, row.why, row.spec)


class Reasons:
    """Why jobs wait, as a pass finds it. Written for some jobs at a time; others write in between.

    Of jobs after `newest` nothing is written: the pass has not seen them. `check` is called between transactions, and
    may raise what ends the pass.
    """

    def __init__(self, database: Database, now: datetime, newest: str, check: Callable[[], None]) -> None:
        self._db, self._now, self._newest, self._check = database, now, newest, check
        self._gathered: dict[str, list[str]] = {}  # ids of jobs by the text

    async def add(self, job_id: str, why: str) -> None:
        """Note why one job waits; write what was noted once it is enough for a transaction."""
        self._gathered.setdefault(why, []).append(job_id)
        if len(self._gathered) >= TEXTS or sum(map(len, self._gathered.values())) >= PIECE:
            await self.write()

    async def write(self) -> None:
        """Write what was noted."""
        gathered, self._gathered = self._gathered, {}
        if not gathered:
            return
        async with self._db.write() as tx:
            for why, ids in gathered.items():
                await self._explain(tx, why, ids)

    async def of_all(self, why: str, which: ColumnElement[bool]) -> None:
        """Write the same reason for all jobs that `which` selects. Those that have it already are only read."""
        wrong = select(JobRow.id).where(waiting(self._now), JobRow.why != why, _not_after(self._newest), which)
        while True:
            async with self._db.glance() as session:
                ids: Sequence[str] = (await session.execute(wrong.limit(PIECE))).scalars().all()
            if not ids:
                return
            async with self._db.write() as tx:
                await self._explain(tx, why, ids)
            self._check()

    async def _explain(self, tx: Tx, why: str, ids: Iterable[str]) -> None:
        statement = (
            update(JobRow)
            .where(waiting(self._now), JobRow.why != why, JobRow.id.in_(ids))
            .values(why=why, version=JobRow.version + 1)
            .returning(JobRow.id)
            .execution_options(synchronize_session=False)
        )
        tx.effects.jobs.update((await tx.session.execute(statement)).scalars())
