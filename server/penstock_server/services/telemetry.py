"""What the decoded frames change: figures, progress, graph documents, and a replica's own registration."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite

from penstock.errors import PeerError
from penstock.protocol.frames import Column, Frame, Kind
from penstock.protocol.graphdoc import GraphDocument, canonical, graph_hash
from penstock.protocol.jobspec import storable
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.services.hangs import Hangs
from penstock_server.services.media import Media
from penstock_server.streams.hub import Hub
from penstock_server.streams.ingest import StreamSource
from penstock_server.streams.live import Live
from penstock_server.streams.metricswriter import MetricsWriter
from penstock_server.streams.tiers import SeriesKey
from penstock_server.tables import GraphRow, JobGraphRow, JobRow, ReplicaRow

MAX_SERIES_NAME = 96
MAX_INT = (1 << 63) - 1
MAX_PID = (1 << 31) - 1
MAX_STREAMS = 4096
"""Streams of which the last reported step is retained."""


class Telemetry:
    """Takes the frames that are decoded. A frame that does not hold what its kind promises is a PeerError."""

    def __init__(
        self, database: Database, clock: Clock, *, live: Live, metrics: MetricsWriter, hub: Hub, hangs: Hangs,
        media: Media,
    ) -> None:  # fmt: skip
        self._db, self._clock, self._live, self._metrics, self._hub = database, clock, live, metrics, hub
        self._hangs, self._media = hangs, media
        self._reported: OrderedDict[int, tuple[int, int]] = OrderedDict()  # step and time_ns, by stream
        self._arrived: dict[int, float] = {}  # of those, when on the monotonic clock
        self._started = clock.monotonic()
        self._started_at = clock.now()

    async def find(self, stream: int) -> StreamSource | None:
        """Return what a stream stands for."""
        statement = (
            select(ReplicaRow, JobRow.attempt)
            .join(JobRow, JobRow.id == ReplicaRow.job_id)
            .where(ReplicaRow.stream == stream)
        )
        async with self._db.glance() as session:
            found = (await session.execute(statement)).one_or_none()
        if found is None:
            return None
        row, attempt = found
        return StreamSource(
            stream, row.id, row.job_id, row.epoch, row.role, row.index, row.node_id, row.attempt,
            current=row.attempt == attempt,
        )  # fmt: skip

    async def on_frame(self, source: StreamSource, frame: Frame) -> None:
        """Apply one frame."""
        match frame.kind:
            case Kind.METRICS:
                self._on_metrics(source, frame)
            case Kind.SCALARS:
                await self._on_scalars(source, _object(frame))
            case Kind.PROGRESS:
                self._on_progress(source, frame)
            case Kind.HELLO:
                await self._on_hello(source, _object(frame))
            case Kind.GRAPH:
                await self._on_graph(source, frame)
            case Kind.GRAPH_USED:
                await self._on_graph_used(source, _object(frame))
            case _:
                return

    def _on_metrics(self, source: StreamSource, frame: Frame) -> None:
        for row in self._figures_of(source.stream, frame):
            for name, value in row.values.items():
                self._put(source, name, row.step, row.time_ns, value)
            self._step(source, row.step, row.time_ns)

    def _figures_of(self, stream: int, frame: Frame) -> list[StepFigures]:
        """Return the rows of a frame of a stream, after what the stream reported before."""
        rows = step_figures(frame, self._reported.get(stream))
        if rows:
            self._reported[stream] = (rows[-1].step, rows[-1].time_ns)
            self._reported.move_to_end(stream)
            self._arrived[stream] = self._clock.monotonic()
        while len(self._reported) > MAX_STREAMS:
            self._arrived.pop(self._reported.popitem(last=False)[0], None)
        return rows

    def silent_s(self, stream: int, began_at: datetime | None) -> float:
        """Return for how many seconds, by this server's monotonic clock, no step of a process has been reported.

        `began_at`: when it began, by this server. Of one that began before the server and reported none to it: since
        the server started. One that has begun and reported none yet is not silent. Wall clocks of hosts do not matter.
        """
        at = self._arrived.get(stream)
        if at is None:
            at = self._started if began_at is not None and began_at < self._started_at else self._clock.monotonic()
        return self._clock.monotonic() - at

    def _step(self, source: StreamSource, step: int, time_ns: int) -> None:
        if source.role == "trainer":
            self._hangs.note(source.job_id, source.attempt, source.index, step, time_ns)

    async def _on_scalars(self, source: StreamSource, body: Mapping[str, Any]) -> None:
        values, media = body.get("values"), body.get("media", {})
        step, time_ns = body.get("step", 0), body.get("time_ns") or time.time_ns()
        are_numbers = fits(step, MAX_INT) and fits(time_ns, MAX_INT)
        if not isinstance(values, dict) or not isinstance(media, dict) or not are_numbers:
            raise PeerError(f"a SCALARS frame holds {_quoted(body)}; expected step, time_ns and values")
        points = {name: number for name, value in values.items() if (number := finite(value)) is not None}
        for name in (*points, *media):
            if not 0 < len(name) <= MAX_SERIES_NAME or not _is_storable(name):
                raise PeerError(f"a SCALARS frame names a series {name[:MAX_SERIES_NAME]!r}, which cannot be stored")
        for name, number in points.items():
            self._put(source, name, step, time_ns, number)
        for name, content in media.items():
            await self._media.take(source, name, step, time_ns, content)
        if points or media:
            self._step(source, step, time_ns)

    def _on_progress(self, source: StreamSource, frame: Frame) -> None:
        if source.suffix:
            return  # trainer 0 speaks for the job
        body = _object(frame)
        if not self._live.of(source.job_id).advance(body, frame.t0_ns or time.time_ns()):
            raise PeerError(f"a PROGRESS frame holds {_quoted(body)}; expected numbers done and total")
        self._metrics.touch(source.job_id)

    def _put(self, source: StreamSource, name: str, step: int, time_ns: int, value: float) -> None:
        self._metrics.add(SeriesKey(source.job_id, name + source.suffix, source.attempt), step, time_ns, value)
        if not source.suffix:
            latest = self._live.of(source.job_id).latest
            latest[name] = value
            latest["step"] = max(step, latest.get("step", 0))

    async def _on_hello(self, source: StreamSource, body: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {}
        for name in ("host", "endpoint"):
            text = body.get(name)
            if isinstance(text, str) and text:
                values[name] = text[:255]
                if not _is_storable(text):
                    raise PeerError(f"the {name} of a HELLO frame is {text[:80]!r}, which cannot be stored")
        if body.get("pid") is not None:
            values["pid"] = body["pid"]
            if not fits(body["pid"], MAX_PID):
                raise PeerError(
                    f"a HELLO frame has a pid {_quoted(body['pid'])}; expected a whole number up to {MAX_PID}"
                )
        if not values:
            return
        async with self._db.write() as tx:
            await tx.session.execute(update(ReplicaRow).where(ReplicaRow.id == source.replica_id).values(**values))
            tx.effects.jobs.add(source.job_id)

    async def _on_graph(self, source: StreamSource, frame: Frame) -> None:
        program, found, text = await asyncio.to_thread(_document, frame.body)
        async with self._db.write() as tx:
            insert = sqlite.insert if self._db.is_sqlite else postgresql.insert
            row = {"hash": found, "program": program, "document": text, "first_seen_at": self._clock.now()}
            await tx.session.execute(insert(GraphRow).values(row).on_conflict_do_nothing())

    async def _on_graph_used(self, source: StreamSource, body: Mapping[str, Any]) -> None:
        found = str(body.get("hash", ""))
        if not _is_storable(found):
            raise PeerError(f"a GRAPH_USED frame names graph {found[:64]!r}")
        async with self._db.write() as tx:
            if await tx.session.get(GraphRow, found) is None:
                raise PeerError(f"a GRAPH_USED frame names graph {found[:64]!r}, which was never sent")
            insert = sqlite.insert if self._db.is_sqlite else postgresql.insert
            use = {"job_id": source.job_id, "replica_id": source.replica_id, "hash": found}
            use_row = insert(JobGraphRow).values({**use, "first_seen_at": self._clock.now()})
            await tx.session.execute(use_row.on_conflict_do_nothing())
            statement = update(ReplicaRow).where(ReplicaRow.id == source.replica_id).values(graph_hash=found)
            await tx.session.execute(statement)
            tx.effects.jobs.add(source.job_id)
        self._hub.publish_graph(source.job_id, source.replica_id, source.stream, found)


def _document(body: object) -> tuple[str, str, str]:
    """Return program, hash and canonical JSON of a graph document. Seconds for a large one: off the loop."""
    try:
        document = GraphDocument.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "/".join(str(part) for part in first["loc"])
        raise PeerError(f"a GRAPH frame holds no graph document: /{where}: {first['msg']}") from error
    # Its JSON is ASCII, so that only the program's name can hold what a database cannot.
    if not _is_storable(document.program):
        raise PeerError(f"a GRAPH frame names a program {document.program[:80]!r}, which cannot be stored")
    return document.program, graph_hash(document), canonical(document).decode()


class StepFigures:
    """The series values of one reported step. A loss that was not fetched (NaN) is left out."""

    __slots__ = ("step", "time_ns", "values")

    def __init__(self, step: int, time_ns: int, values: dict[str, float]) -> None:
        self.step, self.time_ns, self.values = step, time_ns, values


def step_figures(frame: Frame, before: tuple[int, int] | None = None) -> list[StepFigures]:
    """Turn the rows of a METRICS frame into series values. Raises PeerError if a column is missing.

    `before`: step and time_ns of the row that the stream reported last. Samples/s is of the time since then, so that
    what lies between steps counts; the first row, and one whose step or time goes back, has none.
    """
    names = ("STEP", "TIME_NS", "LOSS", "SAMPLES", "STEP_NS", "SYNC_BYTES", "SYNC_NS")
    try:
        columns = [frame.columns[Column[name]].tolist() for name in names]
    except KeyError as error:
        raise PeerError(f"a METRICS frame has no column {error.args[0].name}") from error
    rows = []
    for step, time_ns, loss, samples, step_ns, sync_bytes, sync_ns in zip(*columns, strict=True):
        if step > MAX_INT:
            raise PeerError(f"a METRICS frame has a row of step {step}; the highest is {MAX_INT}")
        values = {"step_ms": step_ns / 1e6, "sync_bytes": float(sync_bytes), "sync_ms": sync_ns / 1e6}
        rate = samples_per_s(samples, (step, time_ns), before)
        if rate is not None:
            values["samples_per_s"] = rate
        before = (step, time_ns)
        if math.isfinite(loss):
            values["loss"] = loss
        rows.append(StepFigures(step, time_ns, values))
    return rows


def samples_per_s(samples: int, now: tuple[int, int], before: tuple[int, int] | None) -> float | None:
    """Return samples a second since `before`, None if nothing was. `samples`: of a step, the mean since then."""
    if before is None or now[0] <= before[0] or now[1] <= before[1]:
        return None
    return samples * (now[0] - before[0]) * 1e9 / (now[1] - before[1])


def fits(value: object, highest: int) -> bool:
    """Whether `value` is a whole number from 0 to `highest`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= highest


def finite(value: object) -> float | None:
    """Return a number as a float; None if it is no number, or none that a float holds."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a JSON whole number has no bounds
        return None
    return number if math.isfinite(number) else None


def _is_storable(text: str) -> bool:
    try:
        storable(text)
    except ValueError:
        return False
    return True


def _quoted(value: object) -> str:
    try:
        return repr(repr(value)[:120])
    except ValueError:  # a whole number of more digits than Python writes out
        return "a number of very many digits"


def _object(frame: Frame) -> Mapping[str, Any]:
    if not isinstance(frame.body, dict):
        raise PeerError(f"a {frame.kind.name} frame holds {str(frame.body)[:80]!r}; expected an object")
    return frame.body
