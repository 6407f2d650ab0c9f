"""How long what jobs left behind is retained. Nothing of a job that has not ended goes, and jobs themselves stay.

One pass deletes metrics and events by transactions of one job each, and files in a thread, so that neither the event
loop nor another writer waits for long. A snapshot goes when no job that has not ended needs it; a new submission of it
uploads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from sqlalchemy import delete, select

from penstock.protocol.states import TERMINAL_JOB, JobState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.instruments import Instruments
from penstock_server.streams.counts import Counts
from penstock_server.streams.recorder import Recorder
from penstock_server.tables import (
    AuditRow,
    EventRow,
    IdempotencyRow,
    JobRow,
    MediaRow,
    MetricRow,
    SeriesRow,
    SnapshotRow,
    TierRow,
    WebhookDeliveryRow,
)

log = structlog.get_logger(__name__)

_ACTIVE = [state.value for state in JobState if state not in TERMINAL_JOB]
_METRICS = (MetricRow, TierRow, SeriesRow, MediaRow)
KEY_LIFE = timedelta(hours=24)
"""How long an `Idempotency-Key` stands for the job that came with it."""
SEGMENTS = "segments"
JOBS_A_PASS = 200
SPARED_DAYS = 1.0
"""So long after the end of a job its recording is not removed for its size."""
AUDIT_ROWS_A_PASS = 20_000
DELIVERIES_DAYS = 7.0
"""How long deliveries of webhooks are retained, sent or not."""
DELIVERIES_A_PASS = 20_000


@dataclass(frozen=True, slots=True)
class Retention:
    """Days after the end of a job; None: for ever. Of snapshots: after the upload; of the audit: the request.

    `telemetry_bytes`: of the recorded frames of all jobs together; None: as much as there is.
    """

    telemetry_days: float | None = None
    telemetry_bytes: int | None = None
    logs_days: float | None = None
    metrics_days: float | None = None
    events_days: float | None = None
    snapshots_days: float | None = None
    audit_days: float | None = None


class Sweeper:
    """Deletes what is older than its retention. Each pass takes up to `JOBS_A_PASS` jobs of each kind."""

    def __init__(
        self, database: Database, clock: Clock, recorder: Recorder, counts: Counts, state_dir: Path, days: Retention,
        meters: Instruments,
    ) -> None:  # fmt: skip
        self._db, self._clock, self._recorder, self._counts = database, clock, recorder, counts
        self._meters = meters
        self._jobs_dir, self._snapshots_dir, self._days = state_dir / "jobs", state_dir / "snapshots", days

    async def step(self) -> None:
        """Delete what is due."""
        await self._sweep_keys(self._clock.now() - KEY_LIFE)
        await self._sweep_deliveries(self._before(DELIVERIES_DAYS))
        for part, days in ((SEGMENTS, self._days.telemetry_days), ("logs", self._days.logs_days)):
            if days is not None:
                await self._sweep_files(part, self._before(days))
        if self._days.telemetry_bytes is not None:
            await self._sweep_recordings(self._days.telemetry_bytes)
        if self._days.metrics_days is not None:
            before = self._before(self._days.metrics_days)
            await self._sweep_rows(SeriesRow, _METRICS, before)
            await self._sweep_rows(MediaRow, (MediaRow,), before)  # of jobs that log nothing else
        if self._days.events_days is not None:
            await self._sweep_rows(EventRow, (EventRow,), self._before(self._days.events_days))
        if self._days.snapshots_days is not None:
            await self._sweep_snapshots(self._before(self._days.snapshots_days))
        if self._days.audit_days is not None:
            await self._sweep_audit(self._before(self._days.audit_days))

    def _before(self, days: float) -> datetime:
        return self._clock.now() - timedelta(days=days)

    async def _sweep_files(self, part: str, before: datetime) -> None:
        found = await asyncio.to_thread(lambda: [path.parent.name for path in self._jobs_dir.glob(f"*/{part}")])
        for start in range(0, len(found), JOBS_A_PASS):
            ended = select(JobRow.id).where(
                JobRow.id.in_(found[start : start + JOBS_A_PASS]), JobRow.finished_at < before
            )
            async with self._db.glance() as session:
                over = (await session.execute(ended)).scalars().all()
            for job_id in over:
                await self._remove(job_id, part, "age")

    async def _remove(self, job_id: str, part: str, reason: str) -> None:
        """Remove one part of what a job left behind. Of a recording it is counted what goes, and why."""
        folder = self._jobs_dir / job_id / part
        if part == SEGMENTS:
            await self._counts.remove(job_id)  # before, so that a crash between the two loses no count
            size = await asyncio.to_thread(_bytes_in, folder)
            self._meters.removed_recordings.labels(reason).inc()
            self._meters.removed_bytes.labels(reason).inc(size)
            log.info("recording removed", job=job_id, reason=reason, bytes=size)
        self._recorder.release(job_id)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _sweep_recordings(self, most_bytes: int) -> None:
        """Remove recordings of jobs that have ended, those that ended first, until theirs are within a size.

        Those of jobs that go on are bounded by each job's quota, and those of the last day stay: they are looked at.
        """
        sizes = await asyncio.to_thread(
            lambda: {path.parent.name: _bytes_in(path) for path in self._jobs_dir.glob(f"*/{SEGMENTS}")}
        )
        ended = await self._ended_first(list(sizes))
        excess = sum(sizes[job_id] for _, job_id in ended) - most_bytes
        for at, job_id in ended:
            if excess <= 0 or at > self._before(SPARED_DAYS):
                return
            await self._remove(job_id, SEGMENTS, "size")
            excess -= sizes[job_id]

    async def _ended_first(self, job_ids: list[str]) -> list[tuple[datetime, str]]:
        found: list[tuple[datetime, str]] = []
        for start in range(0, len(job_ids), JOBS_A_PASS):
            some = JobRow.id.in_(job_ids[start : start + JOBS_A_PASS])
            ended = select(JobRow.finished_at, JobRow.id).where(some, JobRow.finished_at.is_not(None))
            async with self._db.glance() as session:
                found += [(at, job_id) for at, job_id in await session.execute(ended) if at is not None]
        return sorted(found)

    async def _sweep_rows(
        self, having: type[SeriesRow] | type[EventRow] | type[MediaRow], tables: Iterable[type], before: datetime
    ) -> None:
        ended = select(JobRow.id).where(JobRow.state.not_in(_ACTIVE), JobRow.finished_at < before)
        ended = ended.where(select(having.job_id).where(having.job_id == JobRow.id).exists()).limit(JOBS_A_PASS)
        async with self._db.glance() as session:
            over = (await session.execute(ended)).scalars().all()
        for job_id in over:
            async with self._db.write() as tx:
                for table in tables:
                    await tx.session.execute(delete(table).where(table.job_id == job_id))  # type: ignore[attr-defined]

    async def _sweep_keys(self, before: datetime) -> None:
        async with self._db.write() as tx:  # here, since a submission would look at all of them
            await tx.session.execute(delete(IdempotencyRow).where(IdempotencyRow.created_at < before))

    async def _sweep_deliveries(self, before: datetime) -> None:
        of = WebhookDeliveryRow
        oldest = select(of.id).where(of.created_at < before).order_by(of.created_at).limit(DELIVERIES_A_PASS)
        async with self._db.write() as tx:
            await tx.session.execute(delete(of).where(of.id.in_(oldest)))

    async def _sweep_audit(self, before: datetime) -> None:
        oldest = select(AuditRow.id).where(AuditRow.at < before).order_by(AuditRow.at, AuditRow.id)
        async with self._db.write() as tx:
            await tx.session.execute(delete(AuditRow).where(AuditRow.id.in_(oldest.limit(AUDIT_ROWS_A_PASS))))

    async def _sweep_snapshots(self, before: datetime) -> None:
        async with self._db.write() as tx:
            old = (
                await tx.session.execute(select(SnapshotRow.sha256).where(SnapshotRow.created_at < before))
            ).scalars()
            specs = (await tx.session.execute(select(JobRow.spec).where(JobRow.state.in_(_ACTIVE)))).scalars()
            over = set(old).difference(spec.get("snapshot") for spec in specs)
            await tx.session.execute(delete(SnapshotRow).where(SnapshotRow.sha256.in_(sorted(over)[:JOBS_A_PASS])))
        for sha256 in sorted(over)[:JOBS_A_PASS]:
            path = self._snapshots_dir / f"{sha256}.tar.gz"
            # Uploaded again since: an upload puts its file in place on this event loop, and its row after that.
            if path.exists() and path.stat().st_mtime < before.timestamp():
                path.unlink()


def _bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files; of one that goes meanwhile none."""
    size = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
