"""The jobs that wait, in the line of their project: read some at a time, with the reason for which each waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import LIVE_REPLICA, JobState
from penstock_server.db import Database
from penstock_server.services.backoff import LONGEST_OF_ATTEMPTS
from penstock_server.services.fairness import Head
from penstock_server.tables import JobRow, ReplicaRow

AHEAD = 8
"""Jobs of a line that are read at once."""
PIECE = 200
"""Jobs whose `why` one transaction writes: a few ms."""


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


@dataclass(frozen=True, slots=True)
class Queued:
    """A job that waits, as it was read."""

    head: Head
    attempt: int
    why: str
    spec: dict[str, Any]


class Lines:
    """The lines of all projects at one time. What is submitted later, or with a higher priority, another pass sees."""

    def __init__(self, database: Database, now: datetime) -> None:
        self._db, self._now = database, now
        self._read: dict[str, deque[Queued]] = {}

    async def open(self, session: AsyncSession) -> list[Head]:
        """Return the first job of each project."""
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
        return (
            select(*columns).where(waiting(self._now), which).order_by(JobRow.priority.desc(), JobRow.id).limit(AHEAD)
        )


def _queued(row: Any) -> Queued:
    return Queued(Head(row.project, row.priority, row.id), row.attempt, row.why, row.spec)


async def explain(database: Database, now: datetime, why: str, which: ColumnElement[bool]) -> None:
    """Have jobs that wait say why. Those that say so already are only read; others write between the pieces."""
    wrong = waiting(now) & (JobRow.why != why)
    while True:
        async with database.glance() as session:
            ids: Sequence[str] = (
                (await session.execute(select(JobRow.id).where(wrong, which).limit(PIECE))).scalars().all()
            )
        if not ids:
            return
        statement = (
            update(JobRow)
            .where(wrong, JobRow.id.in_(ids))
            .values(why=why, version=JobRow.version + 1)
            .returning(JobRow.id)
            .execution_options(synchronize_session=False)
        )
        async with database.write() as tx:
            tx.effects.jobs.update((await tx.session.execute(statement)).scalars())
