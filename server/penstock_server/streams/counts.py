"""Counts of what became of telemetry (`penstock.protocol.completeness`): taken as frames arrive, written with metrics.

Of a stream that reports, the counts are in memory and replaced in the database with the next flush, for which an answer
to a heartbeat waits: a report that an agent or process may forget is stored. Those of quiet streams may be read again.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Any

from sqlalchemy import select

from penstock.protocol.completeness import COUNTED, Rows, StreamCounts, name_of, report_of, rows_of, stored
from penstock.protocol.frames import Kind
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.streams.metricswriter import MetricsWriter
from penstock_server.streams.recorder import Recorder
from penstock_server.streams.removed import RowsByStream
from penstock_server.tables import StreamCountsRow

MAX_STREAMS = 4096
"""Streams whose counts stay in memory though they are stored."""
_COUNTED = frozenset(COUNTED)


class Counts:
    """The counts of streams. One event loop; the calls of one stream follow one another, as its frames do."""

    def __init__(self, database: Database, clock: Clock, recorder: Recorder, writer: MetricsWriter) -> None:
        self._db, self._clock, self._recorder, self._writer = database, clock, recorder, writer
        self._streams: OrderedDict[int, StreamCounts] = OrderedDict()  # by last use

    async def greet(self, job_id: str, stream: int, body: Any) -> None:
        """Take the body of a HELLO. Raises PeerError if it names a process, and not by a name."""
        if not isinstance(body, Mapping) or body.get("process") is None:
            return  # an older process, which counts nothing
        process = name_of(body["process"])
        counts = await self._of(stream)
        if counts.greet(process, self._now_ms()):
            self._write(job_id, stream, counts)

    async def take(self, job_id: str, stream: int, body: Any) -> bool:
        """Take the body of a GAP; return whether it is a report, and nothing else. Raises PeerError."""
        report = report_of(body)
        if report is None:
            await self._take_agent(job_id, stream, body)
            return False
        counts = await self._of(stream)
        recorded, _ = await self._recorder.rows(job_id)
        if counts.take(report, of_stream(recorded, stream), self._now_ms()):
            self._write(job_id, stream, counts)
        return True

    async def refused(self, job_id: str, stream: int, kind: Kind, rows: int) -> None:
        """Count rows that were refused."""
        await self._add("refused", job_id, stream, kind, rows)

    async def not_recorded(self, job_id: str, stream: int, kind: Kind, rows: int) -> None:
        """Count rows that the disk did not take."""
        await self._add("not_recorded", job_id, stream, kind, rows)

    async def remove(self, job_id: str) -> None:
        """Note that a job's recording is about to be deleted. What was noted before stays, if it is more."""
        streams = await self.of_job(job_id)
        if not streams:
            return
        recorded, removed = await self._recorder.rows(job_id)
        for stream, counts in streams.items():
            now = {"recorded": of_stream(recorded, stream), "quota": of_stream(removed, stream)}
            before = counts.removed or {"recorded": {}, "quota": {}}
            counts.removed = {key: _most(before[key], now[key]) for key in now}
            self._streams[stream] = counts
            self._write(job_id, stream, counts)
        await self._writer.flush()

    async def of_job(self, job_id: str) -> dict[int, StreamCounts]:
        """Return the counts of a job's streams, in the order of the streams."""
        statement = select(StreamCountsRow.stream, StreamCountsRow.counts).where(StreamCountsRow.job_id == job_id)
        async with self._db.glance() as session:
            rows = (await session.execute(statement.order_by(StreamCountsRow.stream))).all()
        found = {stream: stored(json.loads(text)) for stream, text in rows}
        waiting = {stream: self._streams[stream] for stream in self._writer.counts_of(job_id)}
        return dict(sorted({**found, **waiting}.items()))

    async def _take_agent(self, job_id: str, stream: int, body: Any) -> None:
        if not isinstance(body, Mapping) or "total" not in body:
            return
        name, total = name_of(body.get("agent")), rows_of(body["total"])
        counts = await self._of(stream)
        if counts.take_agent(name, total):
            self._write(job_id, stream, counts)

    async def _add(self, what: str, job_id: str, stream: int, kind: Kind, rows: int) -> None:
        if kind in _COUNTED and rows:
            counts = await self._of(stream)
            total: Rows = getattr(counts, what)
            total[kind.name] = total.get(kind.name, 0) + rows
            self._write(job_id, stream, counts)

    async def _of(self, stream: int) -> StreamCounts:
        found = self._streams.get(stream)
        if found is None:
            async with self._db.glance() as session:
                row = await session.get(StreamCountsRow, stream)
            # Another call may have read it meanwhile, and changed it.
            found = self._streams.setdefault(stream, StreamCounts() if row is None else stored(json.loads(row.counts)))
        self._streams.move_to_end(stream)
        self._forget_oldest()
        return found

    def _forget_oldest(self) -> None:
        for stream in list(islice(self._streams, max(0, len(self._streams) - MAX_STREAMS))):
            if not self._writer.counts_wait(stream):
                del self._streams[stream]

    def _write(self, job_id: str, stream: int, counts: StreamCounts) -> None:
        self._streams[stream] = counts  # what waits is read from here, also if it was let go meanwhile
        self._writer.count(job_id, stream, json.dumps(counts.fields(), separators=(",", ":")))

    def _now_ms(self) -> int:
        return int(self._clock.now().timestamp() * 1000)


def of_stream(rows: RowsByStream, stream: int) -> Rows:
    """Return the rows of one stream by the name of their kind."""
    return {kind.name: rows[stream, kind] for kind in COUNTED if rows[stream, kind]}


def _most(a: Rows, b: Rows) -> Rows:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in sorted({*a, *b})}
