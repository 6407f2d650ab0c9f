"""Metrics of jobs, as they are read: few points of a series of any length, whose extremes stay.

An attempt that resumes from a checkpoint repeats steps of the one before it. What counts is the course of the model:
of an earlier attempt the points before the first step of any later one. Cost: the rows that are returned, and an index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVarTuple

from sqlalchemy import ColumnElement, Row, Select, and_, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from penstock_server.db import Database
from penstock_server.schemas import api
from penstock_server.services.jobs import job_row
from penstock_server.streams.tiers import level_for
from penstock_server.tables import MetricRow, SeriesRow, TierRow

PART_ROWS = 1000
MAX_PARTS = 200
"""Attempts that a series is put together from; older ones are left out, and can be asked for by their number."""


Columns = TypeVarTuple("Columns")


@dataclass(frozen=True, slots=True)
class Part:
    """What counts of an attempt: the points before `end_step`, or all."""

    attempt: int
    end_step: int | None


class Metrics:
    """The series of all jobs."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def read(
        self, job_id: str, names: Collection[str] | None, max_points: int, *, attempt: int | None = None
    ) -> dict[str, api.Series]:
        """Return series of a job, each of at most `max_points`; `attempt`: of that one alone. Raises NotFound."""
        async with self._db.read() as session:
            await job_row(session, job_id)
            rows = select(SeriesRow.series, SeriesRow.attempt, SeriesRow.first_step).where(SeriesRow.job_id == job_id)
            if names is not None:
                rows = rows.where(SeriesRow.series.in_(names))
            if attempt is not None:
                rows = rows.where(SeriesRow.attempt == attempt)
            firsts: dict[str, dict[int, int]] = {name: {} for name in names or ()}
            for name, number, step in await session.execute(rows.order_by(SeriesRow.series)):
                firsts.setdefault(name, {})[number] = step
            return {
                name: await _series(session, job_id, name, course(first), max_points) for name, first in firsts.items()
            }


def course(first_steps: dict[int, int]) -> list[Part]:
    """Return what counts of each attempt, oldest first. `first_steps`: the first step of each attempt."""
    parts: list[Part] = []
    end: int | None = None
    for attempt in sorted(first_steps, reverse=True):
        if end is None or first_steps[attempt] < end:
            parts.append(Part(attempt, end))
            end = first_steps[attempt]
    return parts[:MAX_PARTS][::-1]


async def _series(session: AsyncSession, job_id: str, name: str, parts: Sequence[Part], max_points: int) -> api.Series:
    if not parts:
        return api.Series(step=[], time_ns=[], value=[])
    of_series = and_(MetricRow.job_id == job_id, MetricRow.series == name)
    points = select(MetricRow.step, MetricRow.time_ns, MetricRow.value)
    order = (MetricRow.attempt, MetricRow.time_ns, MetricRow.step)
    counted = points.where(of_series, or_(*(_within(part) for part in parts)))
    if (await session.execute(counted.offset(max_points).limit(1))).first() is None:
        return _columns(await _rows(session, counted.order_by(*order)))
    backwards = [one.desc() for one in order[1:]]
    earliest = points.where(of_series, _within(parts[0])).order_by(*order[1:]).limit(1)
    latest = points.where(of_series, _within(parts[-1])).order_by(*backwards).limit(1)
    first, last = (await session.execute(earliest)).one(), (await session.execute(latest)).one()
    level = level_for(last[1] - first[1], max_points)
    tiers = await _rows(session, _tiers(job_id, name, parts, level))
    inner = {(row[1], row[0], row[2]) for row in tiers} | {(row[4], row[3], row[5]) for row in tiers}
    between = [(step, at, value) for at, step, value in sorted(inner) if first[1] < at < last[1]]
    kept = min_max([value for _, _, value in between], max(4, max_points) - 2)
    return _columns([first, *(between[i] for i in kept), last])


async def _rows(session: AsyncSession, statement: Select[*Columns]) -> list[Row[*Columns]]:
    """Read rows in parts, between which the event loop goes on: a caller may ask for 100,000 points."""
    rows: list[Row[*Columns]] = []
    async for part in (await session.stream(statement.execution_options(yield_per=PART_ROWS))).partitions():
        rows.extend(part)
    return rows


def _within(part: Part) -> ColumnElement[bool]:
    return and_(MetricRow.attempt == part.attempt, true() if part.end_step is None else MetricRow.step < part.end_step)


def _tiers(job_id: str, name: str, parts: Sequence[Part], level: int) -> Select[int, int, float, int, int, float]:
    """Select the rows of a tier. An interval that has points after the end of its part counts if both extremes do."""
    counts = [
        and_(
            TierRow.attempt == part.attempt,
            true()
            if part.end_step is None
            else and_(TierRow.low_step < part.end_step, TierRow.high_step < part.end_step),
        )
        for part in parts
    ]
    return select(
        TierRow.low_step, TierRow.low_time_ns, TierRow.low, TierRow.high_step, TierRow.high_time_ns, TierRow.high
    ).where(TierRow.job_id == job_id, TierRow.series == name, TierRow.level == level, or_(*counts))


def _columns(rows: Sequence[Sequence[float]]) -> api.Series:
    steps, times, values = zip(*rows, strict=True) if rows else ((), (), ())
    return api.Series.model_construct(step=list(steps), time_ns=list(times), value=list(values))


def min_max(values: Sequence[float], max_points: int) -> list[int]:
    """Return ascending indices of at most `max_points` values: first, last, and each bucket's extremes.

    All indices if there are no more values than that. `max_points` below 4 counts as 4.
    """
    n = len(values)
    limit = max(4, max_points)
    if n <= limit:
        return list(range(n))
    buckets = (limit - 2) // 2
    chosen = {0, n - 1}
    for b in range(buckets):
        start, stop = 1 + b * (n - 2) // buckets, 1 + (b + 1) * (n - 2) // buckets
        if start < stop:
            chosen.add(min(range(start, stop), key=values.__getitem__))
            chosen.add(max(range(start, stop), key=values.__getitem__))
    return sorted(chosen)
