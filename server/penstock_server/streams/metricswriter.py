"""Metric points and newest figures on their way into the database: gathered, written in one go, then published.

Points are published after they are stored, under the lock that a subscriber's snapshot takes: so a page
gets each point once, in its snapshot or as a delta. When the database is unreachable, the write is retried and nothing
is dropped. When it refuses what it is given, each job is written by itself, and only a job that is refused again
loses its points of this flush; they are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from sqlalchemy import update
from sqlalchemy.dialects import postgresql, sqlite

from penstock.protocol.stream import Points
from penstock_server.db import Database, DatabaseAway, TakenOver
from penstock_server.instruments import Instruments
from penstock_server.streams.hub import Hub
from penstock_server.streams.live import Live
from penstock_server.tables import JobRow, MetricRow

log = structlog.get_logger(__name__)

SETTLE_S = 2.0
"""How long an answer to a heartbeat waits for the database: longer would be taken for a dead connection."""
_AWAY = (DatabaseAway, TakenOver, OSError, TimeoutError, asyncio.CancelledError)
"""What a database raises that is unreachable, busy or full; the same write may go well later."""


class MetricsWriter:
    """The buffer in front of the metrics table."""

    def __init__(self, database: Database, hub: Hub, live: Live, instruments: Instruments) -> None:
        self._db, self._hub, self._live, self._instruments = database, hub, live, instruments
        self._points: dict[str, dict[str, Points]] = {}
        self._touched: set[str] = set()
        self.lock = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None  # a flush that waits for its turn: it will write what comes now
        self.on_stored: Callable[[set[str]], None] = lambda job_ids: None

    def add(self, job_id: str, series: str, step: int, time_ns: int, value: float) -> None:
        """Take one finite point."""
        columns = self._points.setdefault(job_id, {}).setdefault(series, Points(step=[], time_ns=[], value=[]))
        columns["step"].append(step)
        columns["time_ns"].append(time_ns)
        columns["value"].append(value)

    def touch(self, job_id: str) -> None:
        """Have a job's newest figures written with the next flush."""
        self._touched.add(job_id)

    async def flush(self) -> set[str]:
        """Write what was gathered; return the jobs whose figures changed."""
        async with self.lock:  # first, so that a flush also waits for one that is under way
            if not self._points and not self._touched:
                return set()
            points, self._points = self._points, {}
            touched, self._touched = self._touched | set(points), set()
            try:
                points = await self._store(points, touched)
            except BaseException:
                self._take_back(points, touched)
                raise
            for job_id, series in points.items():
                self._hub.publish_metrics(job_id, series)
        self.on_stored(touched)
        return touched

    async def settled(self) -> bool:
        """Write what was gathered; return whether it is stored now, all but what the database refuses for good.

        False also if that takes longer than `SETTLE_S`; it goes on beside then.
        """
        task = self._next
        if task is None:
            task = self._next = asyncio.create_task(self._flush_in_turn(), name="metrics")
        await asyncio.wait({task}, timeout=SETTLE_S)
        return task.done() and not task.cancelled() and task.result()

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

    async def _store(self, points: dict[str, dict[str, Points]], touched: set[str]) -> dict[str, dict[str, Points]]:
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

    async def _write(self, points: dict[str, dict[str, Points]], touched: set[str]) -> None:
        rows = [
            {"job_id": job_id, "series": name, "step": step, "time_ns": time_ns, "value": value}
            for job_id, series in points.items()
            for name, c in series.items()
            for step, time_ns, value in zip(c["step"], c["time_ns"], c["value"], strict=True)
        ]
        async with self._db.write() as tx:
            if rows:
                insert = sqlite.insert if self._db.is_sqlite else postgresql.insert
                await tx.session.execute(insert(MetricRow).on_conflict_do_nothing(), rows)
            for job_id in sorted(touched):
                live = self._live.get(job_id)
                if live is not None:
                    values = {"latest": dict(live.latest), "eta_s": live.eta_s}
                    if live.progress is not None:
                        values["progress"] = live.progress
                    await tx.session.execute(update(JobRow).where(JobRow.id == job_id).values(**values))
        self._instruments.metric_points.inc(len(rows))

    def _take_back(self, points: dict[str, dict[str, Points]], touched: set[str]) -> None:
        newer, self._points = self._points, points
        self._touched |= touched
        for job_id, series in newer.items():
            for name, columns in series.items():
                for step, time_ns, value in zip(columns["step"], columns["time_ns"], columns["value"], strict=True):
                    self.add(job_id, name, step, time_ns, value)
