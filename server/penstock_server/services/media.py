"""Tables and histograms that jobs log: stored as they come, bounded for each name and each job, and read.

A repetition (same name, attempt, step and time) is taken once. Of each name the newest `KEPT` are retained, of each job
the newest within `JOB_BYTES`; how many made room is known by the number of the oldest that is there. They go with the
metrics of their job (`retention`).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Literal, cast

from sqlalchemy import Row, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from penstock.errors import PeerError
from penstock.protocol.media import received
from penstock_server.db import Database, Tx
from penstock_server.problems import NotFound
from penstock_server.schemas.media import MediaItem, MediaSeries
from penstock_server.services.jobs import job_row
from penstock_server.streams.ingest import StreamSource
from penstock_server.tables import MediaRow
from penstock_server.uuid7 import uuid7

KEPT = 100
"""Of each name."""
MAX_NAMES = 100
"""Of each job; what has another name is refused."""
JOB_BYTES = 64 << 20
"""Of each job, compressed."""
DEFLATE_LEVEL = 1


class Media:
    """What all jobs have logged. `added` is called with the job and the name of each that is stored."""

    def __init__(self, database: Database, added: Callable[[str, str], None]) -> None:
        self._db, self._added = database, added

    async def take(self, source: StreamSource, name: str, step: int, time_ns: int, content: object) -> None:
        """Store one. Raises PeerError if it is no table and no histogram, or its job has too many names."""
        try:
            kind, packed = await asyncio.to_thread(received, content)  # some 0.1 s for a large table
        except PeerError as error:
            raise PeerError(f"{name!r} of step {step} is not stored: {error}") from error
        stored = await asyncio.to_thread(zlib.compress, packed, DEFLATE_LEVEL)
        row: dict[str, Any] = {
            "id": uuid7(), "job_id": source.job_id, "name": name + source.suffix, "attempt": source.attempt,
            "step": step, "time_ns": time_ns, "type": kind, "size_bytes": len(packed), "stored_bytes": len(stored),
            "content": stored,
        }  # fmt: skip
        async with self._db.write() as tx:
            row["number"] = await _next_number(tx, source.job_id, name + source.suffix)
            insert = sqlite.insert if self._db.is_sqlite else postgresql.insert
            statement = insert(MediaRow).values(row).on_conflict_do_nothing().returning(MediaRow.id)
            if (await tx.session.execute(statement)).first() is None:
                return
            await _make_room(tx, source.job_id, name + source.suffix, row["number"])
        self._added(source.job_id, name + source.suffix)

    async def of(self, job_id: str) -> list[MediaSeries]:
        """Return what a job has logged, by name. Raises NotFound."""
        columns = (
            MediaRow.name, MediaRow.type, MediaRow.number, MediaRow.id, MediaRow.attempt, MediaRow.step,
            MediaRow.time_ns, MediaRow.size_bytes,
        )  # fmt: skip
        async with self._db.read() as session:
            await job_row(session, job_id)
            found = await session.execute(
                select(*columns).where(MediaRow.job_id == job_id).order_by(MediaRow.name, MediaRow.number)
            )
            rows = found.all()
        return [_series(name, list(some)) for name, some in groupby(rows, key=lambda row: str(row.name))]

    async def content(self, job_id: str, media_id: str) -> bytes:
        """Return the JSON of one. Raises NotFound."""
        async with self._db.read() as session:
            await job_row(session, job_id)
            statement = select(MediaRow.content).where(MediaRow.id == media_id, MediaRow.job_id == job_id)
            stored = (await session.execute(statement)).scalar_one_or_none()
        if stored is None:
            raise NotFound("table or histogram", media_id)
        return await asyncio.to_thread(zlib.decompress, stored)


async def _next_number(tx: Tx, job_id: str, name: str) -> int:
    """Return the number of the next of a name, from 1. Raises PeerError for one name too many."""
    of_job = MediaRow.job_id == job_id
    newest = select(func.max(MediaRow.number)).where(of_job, MediaRow.name == name)
    number = (await tx.session.execute(newest)).scalar_one()
    if number is not None:
        return int(number) + 1
    names = (await tx.session.execute(select(func.count(MediaRow.name.distinct())).where(of_job))).scalar_one()
    if names >= MAX_NAMES:
        raise PeerError(f"{name!r} is not stored: the job has logged tables or histograms of {names} names already")
    return 1


async def _make_room(tx: Tx, job_id: str, name: str, newest: int) -> None:
    """Delete what is beyond the bounds, the oldest first; never the one that came just now."""
    of_job = MediaRow.job_id == job_id
    await tx.session.execute(delete(MediaRow).where(of_job, MediaRow.name == name, MediaRow.number <= newest - KEPT))
    total = (await tx.session.execute(select(func.sum(MediaRow.stored_bytes)).where(of_job))).scalar_one()
    excess, gone = int(total) - JOB_BYTES, list[str]()
    if excess <= 0:
        return
    sizes = await tx.session.execute(select(MediaRow.id, MediaRow.stored_bytes).where(of_job).order_by(MediaRow.id))
    for media_id, size in sizes.all()[:-1]:
        if excess <= 0:
            break
        excess -= size
        gone.append(media_id)
    await tx.session.execute(delete(MediaRow).where(MediaRow.id.in_(gone)))


def _series(name: str, rows: Sequence[Row[str, str, int, str, int, int, int, int]]) -> MediaSeries:
    items = [
        MediaItem(id=row.id, attempt=row.attempt, step=row.step, time_ns=row.time_ns, size_bytes=row.size_bytes)
        for row in rows
    ]
    kind = cast('Literal["table", "histogram"]', rows[-1].type)
    return MediaSeries(name=name, type=kind, removed=rows[-1].number - len(rows), items=items)
