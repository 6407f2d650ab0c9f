"""The list of jobs as a reader asks for it: filtered, searched and ordered by the database, one page after another.

Pages are by key: the token of a page names the job before it, and the place that this job had, so that jobs that come
or end meanwhile shift nothing. Orders that have an index (by time, by attention) read no more than the page.
A search for words, and orders by name or by a metric, read all jobs that the other conditions leave: no index has them.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import JobState
from penstock_server.problems import Conflict
from penstock_server.tables import JobRow

J = JobState
WORDS = "^ *([^ ]+ +){0,7}[^ ]* *$"
"""At most eight words."""
ATTENTION = (
    (J.STARTING, J.RUNNING, J.RECOVERING, J.STOPPING),
    (J.FAILED,),
    (J.CREATED, J.QUEUED),
    (J.SUCCEEDED, J.CANCELLED),
)
"""States in the order in which they want to be looked at."""
assert sorted(state for group in ATTENTION for state in group) == sorted(J)


class JobOrder(StrEnum):
    """What comes first in a list of jobs; among equals the newest."""

    NEWEST = "newest"
    ATTENTION = "attention"
    NAME = "name"
    LOSS = "loss"
    SPEED = "speed"


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Which jobs. Empty: whatever they are. `start`: of the name; `words`: each in name, id, state, kind or reason."""

    states: tuple[JobState, ...] = ()
    name: str | None = None
    start: str = ""
    words: tuple[str, ...] = ()
    projects: Collection[str] | None = None


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a search, each once."""
    return tuple(dict.fromkeys(word for word in text.split(" ") if word))


def conditions(query: JobQuery, *, is_sqlite: bool) -> list[ColumnElement[bool]]:
    """Return what the jobs of a query fulfil."""
    found: list[ColumnElement[bool]] = []
    if query.states:
        found.append(JobRow.state.in_(query.states))
    if query.name is not None:
        found.append(JobRow.name == query.name)
    if query.start:
        found.append(_starts_with(query.start, is_sqlite=is_sqlite))
    if query.projects is not None:
        found.append(JobRow.project.in_(query.projects))
    columns = (JobRow.name, JobRow.id, JobRow.state, JobRow.kind, JobRow.why)
    return found + [or_(*(column.icontains(word, autoescape=True) for column in columns)) for word in query.words]


def _starts_with(start: str, *, is_sqlite: bool) -> ColumnElement[bool]:
    """Select jobs by the beginning of their names, each database in the way that its index can answer."""
    if is_sqlite:  # its LIKE ignores case, and therefore an index
        return (JobRow.name >= start) & (JobRow.name < start[:-1] + chr(ord(start[-1]) + 1))
    return JobRow.name.startswith(start, autoescape=True)


async def page_of(
    session: AsyncSession, query: JobQuery, order: JobOrder, *, after: str | None, place: str = "", limit: int,
    is_sqlite: bool,
) -> Sequence[JobRow]:  # fmt: skip
    """Return the first `limit` jobs of a query that follow job `after`. Raises a problem if that is no job any more.

    `place`: of that job then, as `place_of` gives it; '': the one that it has now.
    """
    if order is JobOrder.ATTENTION:
        return await _by_attention(session, query, after=after, place=place, limit=limit, is_sqlite=is_sqlite)
    statement = select(JobRow).where(*conditions(query, is_sqlite=is_sqlite)).limit(limit)
    key = _key_of(order, is_sqlite=is_sqlite)
    if key is not None:
        statement = statement.order_by(key.column.desc() if key.descends else key.column)
    if after is not None:
        statement = statement.where(JobRow.id < after if key is None else await _behind(session, key, after, place))
    return (await session.execute(statement.order_by(JobRow.id.desc()))).scalars().all()


@dataclass(frozen=True, slots=True)
class _Key:
    column: ColumnElement[Any]
    descends: bool = False


_LAST = 1.7e308


def _key_of(order: JobOrder, *, is_sqlite: bool) -> _Key | None:
    """Return what comes before the time. Names are in the order of their characters in any database."""
    if order is JobOrder.NAME:
        return _Key(JobRow.name.expression if is_sqlite else JobRow.name.collate("C"))
    if order is JobOrder.LOSS:
        return _Key(func.coalesce(JobRow.latest["loss"].as_float(), _LAST))
    if order is JobOrder.SPEED:
        return _Key(func.coalesce(JobRow.latest["samples_per_s"].as_float(), -1.0), descends=True)
    return None


def place_of(job: JobRow, order: JobOrder) -> str:
    """Return the place of a job in an order, for a token; '' in those in which it does not change."""
    if order is JobOrder.ATTENTION:
        return f"{_group_of(JobState(job.state))}"
    if order is JobOrder.LOSS:
        return _digits(job.latest.get("loss"), _LAST)
    if order is JobOrder.SPEED:
        return _digits(job.latest.get("samples_per_s"), -1.0)
    return ""


def _digits(value: float | None, default: float) -> str:
    return struct.pack(">d", default if value is None else value).hex()


def _group_of(state: JobState) -> int:
    return next(i for i, group in enumerate(ATTENTION) if state in group)


async def _behind(session: AsyncSession, key: _Key, after: str, place: str) -> ColumnElement[bool]:
    value = await _value(session, select(key.column).where(JobRow.id == after))
    if len(place) == 2 * struct.calcsize(">d"):
        value = struct.unpack(">d", bytes.fromhex(place))[0]
    farther = key.column < value if key.descends else key.column > value
    return or_(farther, (key.column == value) & (JobRow.id < after))


async def _by_attention(
    session: AsyncSession, query: JobQuery, *, after: str | None, place: str, limit: int, is_sqlite: bool
) -> Sequence[JobRow]:
    """As `page_of`: group after group, each by its index."""
    groups = [[state for state in group if not query.states or state in query.states] for group in ATTENTION]
    at = 0
    if after is not None:
        state = JobState(await _value(session, select(JobRow.state).where(JobRow.id == after)))
        at = int(place) if len(place) == 1 and int(place) < len(ATTENTION) else _group_of(state)
    found: list[JobRow] = []
    for group in groups[at:]:
        if group and len(found) < limit:
            part = replace(query, states=tuple(group))
            begin = after if group == groups[at] else None
            room = limit - len(found)
            found += await page_of(session, part, JobOrder.NEWEST, after=begin, limit=room, is_sqlite=is_sqlite)
    return found


async def _value(session: AsyncSession, statement: Select[Any]) -> Any:
    row = (await session.execute(statement)).one_or_none()
    if row is None:
        raise Conflict("page_gone", "the job before this page is not there any more; begin with the first page")
    return row[0]


async def counts_of(session: AsyncSession, query: JobQuery, *, is_sqlite: bool) -> dict[str, int]:
    """Return how many jobs of a query are in each state; states without jobs are left out."""
    statement = select(JobRow.state, func.count()).where(*conditions(query, is_sqlite=is_sqlite))
    return {str(state): int(count) for state, count in await session.execute(statement.group_by(JobRow.state))}
