"""Metric points and newest figures on their way into the database: gathered, written some jobs at once, then published.

Points are stored with the tiers that long series are read from (`tiers`), and published after that. When the database
is unreachable, the write is retried and nothing is dropped. When it refuses what it is given, each job is written by
itself, and only a job that is refused again loses its points of this flush; they are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from sqlalchemy import Table, Update, bindparam, case, select, tuple_, update

from penstock.protocol.stream import Points
from penstock_server.bulk import Bulk, Insert
from penstock_server.db import Database, DatabaseAway, TakenOver, Tx
from penstock_server.instruments import Instruments
from penstock_server.streams.hub import Hub
from penstock_server.streams.live import Live
from penstock_server.streams.tiers import MAX_REMEMBERED, SeriesKey, Summary, Tier
from penstock_server.tables import JobRow, MetricRow, SeriesRow, StreamCountsRow, TierRow

log = structlog.get_logger(__name__)

SETTLE_S = 2.0
"""How long an answer to a heartbeat waits for the database: longer would be taken for a dead connection."""
REST_S = 0.1
"""Heartbeats cause a flush at most so often."""
PIECE = 25
"""Jobs whose points one transaction stores: some 10 ms on SQLite, 50 on PostgreSQL, for which a submission waits."""
_AWAY = (DatabaseAway, TakenOver, OSError, TimeoutError, asyncio.CancelledError)
"""What a database raises that is unreachable, busy or full; the same write may go well later."""
_NEVER = 1 << 63
_Gathered = dict[str, dict[SeriesKey, Points]]


class MetricsWriter:
    """The buffer in front of the metrics table."""

    def __init__(self, database: Database, hub: Hub, live: Live, instruments: Instruments) -> None:
        self._db, self._hub, self._live, self._instruments = database, hub, live, instruments
        dialect = database.engine.dialect
        self._points_in = Bulk(MetricRow, _once, _POINT, dialect)
        self._firsts_in = Bulk(SeriesRow, _first_step, (*_KEY, "first_step"), dialect)
        self._tiers_in = Bulk(TierRow, _widen, _TIER, dialect)
        self._counts_in = Bulk(StreamCountsRow, _replaced, _COUNTS, dialect)
        self._counts: dict[int, tuple[int, str, str]] = {}  # rows, by stream
        self._points: dict[str, dict[SeriesKey, Points]] = {}
        self._lost: dict[str, dict[str, int]] = {}
        self._summary = Summary()
        self._first_steps: dict[SeriesKey, int] = {}  # stored ones; forgotten ones are written again
        self._touched: set[str] = set()
        self.lock = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None  # a flush that waits for its turn: it will write what comes now
        self._rested: asyncio.Task[bool] | None = None  # a flush that will begin once it has rested
        self.on_stored: Callable[[set[str]], None] = lambda job_ids: None

    def add(self, key: SeriesKey, step: int, time_ns: int, value: float) -> None:
        """Take one finite point."""
        columns = self._points.setdefault(key.job_id, {}).setdefault(key, Points(step=[], time_ns=[], value=[]))
        columns["step"].append(step)
        columns["time_ns"].append(time_ns)
        columns["value"].append(value)

    def touch(self, job_id: str) -> None:
        """Have a job's newest figures written with the next flush."""
        self._touched.add(job_id)

    def lose(self, job_id: str, amounts: Mapping[str, int]) -> None:
        """Count telemetry of a job that never came; written with the next flush."""
        lost = self._lost.setdefault(job_id, {})
        for kind, rows in amounts.items():
            lost[kind] = lost.get(kind, 0) + rows
        self.touch(job_id)

    def count(self, job_id: str, stream: int, counts: str) -> None:
        """Take the counts of a stream, in place of those that wait; written with the next flush."""
        self._counts[stream] = (stream, job_id, counts)
        self.touch(job_id)

    def counts_wait(self, stream: int) -> bool:
        """Whether counts of a stream are not stored yet."""
        return stream in self._counts

    def counts_of(self, job_id: str) -> list[int]:
        """Return the streams of a job whose counts are not stored yet."""
        return [stream for stream, of, _ in self._counts.values() if of == job_id]

    async def flush(self) -> set[str]:
        """Write what was gathered; return the jobs whose figures changed."""
        async with self.lock:  # first, so that a flush also waits for one that is under way
            if not self._points and not self._touched:
                return set()
            points, self._points = self._points, {}
            touched, self._touched = self._touched | set(points), set()
            left = sorted(touched)
            try:
                while left:
                    await self._store_piece(points, left[:PIECE])
                    left = left[PIECE:]
            except BaseException:
                self._take_back({job_id: points[job_id] for job_id in left if job_id in points}, set(left))
                raise
        return touched

    async def _store_piece(self, points: _Gathered, job_ids: Sequence[str]) -> None:
        """Store and publish what is of some jobs. Between pieces others write, and the event loop turns."""
        mine = {job_id: points[job_id] for job_id in job_ids if job_id in points}
        for job_id, series in (await self._store(mine, set(job_ids))).items():
            for key, columns in series.items():
                self._hub.publish_metrics(job_id, {key.series: columns})
        self.on_stored(set(job_ids))

    async def settled(self) -> bool:
        """Write what was gathered; return whether it is stored now, all but what the database refuses for good.

        False also if that takes longer than `SETTLE_S`; it goes on beside then.
        """
        task = self._next
        if task is None:
            task = self._next = asyncio.create_task(self._flush_in_turn(), name="metrics")
        await asyncio.wait({task}, timeout=SETTLE_S)
        return task.done() and not task.cancelled() and task.result()

    async def settled_soon(self) -> bool:
        """Do as `settled`, a moment later: so that the heartbeats of many agents cost few flushes."""
        if not (self._points or self._touched or self.lock.locked()):
            return True
        task = self._rested
        if task is None:
            task = self._rested = asyncio.create_task(self._settle_after_rest(), name="metrics")
        await asyncio.wait({task}, timeout=SETTLE_S)
        return task.done() and not task.cancelled() and task.result()

    async def _settle_after_rest(self) -> bool:
        await asyncio.sleep(REST_S)
        self._rested = None
        return await self.settled()

    async def _flush_in_turn(self) -> bool:
        try:
            async with self.lock:
                self._next = None
            await self.flush()
        except (DatabaseAway, TakenOver):
            pass  # the loop that flushes reports it
        except Exception:  # a boundary: what could not be written is retained, and tried again
            log.exception("metrics not stored yet")
        else:
            return True
        return False

    async def _store(self, points: _Gathered, touched: set[str]) -> _Gathered:
        """Write; return what is in the database now."""
        try:
            await self._write(points, touched)
            return points
        except _AWAY:
            raise
        except Exception:  # a boundary: one job's figures must not keep every other job's from being stored
            log.exception("metrics refused by the database; writing job by job")
        stored = {}
        for job_id in sorted(touched):
            mine = {job_id: points[job_id]} if job_id in points else {}
            try:
                await self._write(mine, {job_id})
                stored.update(mine)
            except _AWAY:
                raise
            except Exception:  # a boundary, as above
                rows = sum(len(c["step"]) for series in mine.values() for c in series.values())
                self._instruments.refused.labels("bad_metrics").inc(max(1, rows))
                log.exception("metrics of a job dropped", job=job_id, rows=rows)
        return stored

    async def _write(self, points: _Gathered, touched: set[str]) -> None:
        series = {key: columns for mine in points.values() for key, columns in mine.items()}
        rows = [
            (*key, step, time_ns, value)
            for key, c in series.items()
            for step, time_ns, value in zip(c["step"], c["time_ns"], c["value"], strict=True)
        ]
        firsts = {
            key: first for key, c in series.items() if (first := min(c["step"])) < self._first_steps.get(key, _NEVER)
        }
        tiers = self._summary.of(series)
        async with self._db.write() as tx:
            connection = await tx.session.connection()
            await self._points_in.run(connection, rows)
            await self._firsts_in.run(connection, [(*key, step) for key, step in firsts.items()])
            await self._tiers_in.run(connection, [_tier_row(tier) for tier in tiers])
            lost = {job_id: dict(self._lost[job_id]) for job_id in touched if job_id in self._lost}
            for job_id, amounts in sorted(lost.items()):
                await _add_lost(tx, job_id, amounts)
            counts = [row for row in self._counts.values() if row[1] in touched]
            await self._counts_in.run(connection, counts)
            await self._write_figures(tx, touched)
        self._summary.stored(tiers)
        for job_id, amounts in lost.items():
            self._forget_lost(job_id, amounts)
        for row in counts:
            if self._counts[row[0]] is row:
                del self._counts[row[0]]
            else:
                self._touched.add(row[1])
        if len(self._first_steps) > MAX_REMEMBERED:
            self._first_steps.clear()
        self._first_steps.update(firsts)
        self._instruments.metric_points.inc(len(rows))

    async def _write_figures(self, tx: Tx, touched: set[str]) -> None:
        """Write the newest figures of jobs: one statement for all that report the same columns."""
        known = [(job_id, live) for job_id in sorted(touched) if (live := self._live.get(job_id)) is not None]
        for has_progress in (False, True):
            found: list[dict[str, Any]] = [
                {"of": job_id, "new_latest": dict(live.latest), "new_eta_s": live.eta_s, "new_progress": live.progress}
                for job_id, live in known
                if (live.progress is not None) is has_progress
            ]
            if found:
                await (await tx.session.connection()).execute(_FIGURES[has_progress], found)

    def _forget_lost(self, job_id: str, written: Mapping[str, int]) -> None:
        left = {kind: rows - written.get(kind, 0) for kind, rows in self._lost.pop(job_id).items()}
        if any(left.values()):
            self._lost[job_id] = left  # counted while it was written
            self._touched.add(job_id)

    def _take_back(self, points: _Gathered, touched: set[str]) -> None:
        newer, self._points = self._points, points
        self._touched |= touched
        for series in newer.values():
            for key, columns in series.items():
                for step, time_ns, value in zip(columns["step"], columns["time_ns"], columns["value"], strict=True):
                    self.add(key, step, time_ns, value)


def _figures(*names: str) -> Update:
    table = JobRow.__table__
    assert isinstance(table, Table)
    values = {name: bindparam(f"new_{name}", type_=table.c[name].type) for name in names}
    return update(table).where(table.c.id == bindparam("of")).values(values)


_FIGURES = {False: _figures("latest", "eta_s"), True: _figures("latest", "eta_s", "progress")}
"""Statements for many jobs, by whether their progress is known."""


async def _add_lost(tx: Tx, job_id: str, amounts: Mapping[str, int]) -> None:
    found = (await tx.session.execute(select(JobRow.lost).where(JobRow.id == job_id))).scalar_one_or_none() or {}
    total = {kind: found.get(kind, 0) + amounts.get(kind, 0) for kind in sorted({*found, *amounts})}
    await tx.session.execute(update(JobRow).where(JobRow.id == job_id).values(lost=total))
    tx.effects.jobs.add(job_id)


_KEY = SeriesKey._fields
_COUNTS = ("stream", "job_id", "counts")
_POINT = (*_KEY, "step", "time_ns", "value")
_TIER = (
    *(*_KEY, "level", "bucket", "low", "low_time_ns", "low_step"),
    *("high", "high_time_ns", "high_step"),
)


def _tier_row(tier: Tier) -> tuple[Any, ...]:
    low, high = tier.extremes.low, tier.extremes.high
    return (*tier.key, tier.level, tier.bucket, *low, -high.negated, high.time_ns, high.step)


def _once(insert: Insert) -> Insert:
    return insert.on_conflict_do_nothing()


def _first_step(insert: Insert) -> Insert:
    lower = case(
        (insert.excluded.first_step < SeriesRow.first_step, insert.excluded.first_step), else_=SeriesRow.first_step
    )
    return insert.on_conflict_do_update(index_elements=["job_id", "series", "attempt"], set_={"first_step": lower})


def _replaced(insert: Insert) -> Insert:
    return insert.on_conflict_do_update(index_elements=["stream"], set_={"counts": insert.excluded.counts})


def _widen(insert: Insert) -> Insert:
    """Have a row that is there keep whichever extremes are further out, as `tiers.Extremes.joined` does."""
    new = insert.excluded
    values: dict[str, Any] = {}
    for end, sign in (("low", 1), ("high", -1)):
        names = (end, f"{end}_time_ns", f"{end}_step")
        ours, theirs = ([getattr(row, name) for name in names] for row in (TierRow, new))
        is_further = tuple_(theirs[0] * sign, *theirs[1:]) < tuple_(ours[0] * sign, *ours[1:])
        values |= {name: case((is_further, b), else_=a) for name, a, b in zip(names, ours, theirs, strict=True)}
    key = ["job_id", "series", "attempt", "level", "bucket"]
    return insert.on_conflict_do_update(index_elements=key, set_=values)
