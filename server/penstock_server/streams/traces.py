"""Traces of jobs, to a collector of OpenTelemetry: what `streams.spans` makes of the events that commits have written.

Spans leave in batches, on a thread of OpenTelemetry's, which drops what a collector does not take (and logs that); no
request and no pipeline waits for it. After a restart the spans of jobs that go on are sent again, under their numbers.
"""

from __future__ import annotations

import secrets
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from sqlalchemy import select

from penstock.errors import Unavailable
from penstock.protocol.states import TERMINAL_JOB, TERMINAL_REPLICA
from penstock.version import __version__
from penstock_server.clock import Clock, unix_ns
from penstock_server.db import Database, Effects
from penstock_server.streams.spans import Seen, Span, SpanId, Subject, parsed, root_of, spans_of
from penstock_server.tables import EventRow, JobRow, NodeRow, ReplicaRow

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

SEND_EVERY_MS = 1000
MOST_WAITING = 1 << 15
"""Spans, until they are sent: beyond them, they are dropped."""
CLOSE_S = 3.0
BATCH = 500
"""Events that are read at once."""


class Sink(Protocol):
    """Where spans go."""

    def put(self, span: Span) -> None:
        """Have a span sent."""

    def close(self) -> None:
        """Send what is left. Waits for it, `CLOSE_S` at most."""


class Collector:
    """A collector that takes OTLP over HTTP below `endpoint`. Raises Unavailable if OpenTelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise Unavailable(
                "PENSTOCK_SERVER_OTLP_ENDPOINT needs OpenTelemetry: pip install 'penstock[otel]'"
            ) from error
        self._resource = Resource.create({"service.name": "penstock-server", "service.version": __version__})
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
        self._batches = BatchSpanProcessor(exporter, MOST_WAITING, schedule_delay_millis=SEND_EVERY_MS)

    def put(self, span: Span) -> None:
        """Have a span sent, with the next batch."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode

        made = ReadableSpan(
            span.name,
            context=_context(span.id),
            parent=None if span.parent is None else _context(span.parent),
            resource=self._resource,
            attributes=dict(span.attributes),
            links=[] if span.link is None else [Link(_context(span.link))],
            kind=SpanKind.SERVER if span.is_of_server else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=unix_ns(span.start),
            end_time=unix_ns(span.end),
        )
        self._batches.on_end(made)

    def close(self) -> None:
        """Send what is left; what a collector does not take by then is dropped."""
        closing = threading.Thread(target=self._shut_down, name="traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _shut_down(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]  # OpenTelemetry's has no annotations


def _context(of: SpanId) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(of.trace, of.span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class Traces:
    """The traces of one server's jobs. `sink`: None, and nothing is done."""

    def __init__(self, database: Database, clock: Clock, sink: Sink | None) -> None:
        self._db, self._clock, self._sink = database, clock, sink
        self._marked: set[str] = set()
        self._seen: dict[str, Seen] = {}  # of jobs that have not ended

    def mark(self, effects: Effects) -> bool:
        """Note what a commit has written. Return whether `step` has something to do."""
        if self._sink is not None:
            self._marked |= {event.job_id for event in effects.events if event.job_id is not None}
        return bool(self._marked)

    async def step(self) -> None:
        """Send the spans that have ended since the last step."""
        while self._marked:
            job_id = self._marked.pop()
            try:
                await self._send(job_id)
            except BaseException:
                self._marked.add(job_id)
                raise

    async def _send(self, job_id: str) -> None:
        while await self._send_some(job_id):
            pass

    async def _send_some(self, job_id: str) -> bool:
        """Send the spans that the next events of a job end. Return whether there may be more."""
        assert self._sink is not None
        seen = self._seen.get(job_id) or Seen()
        of = EventRow
        new = select(of).where(of.job_id == job_id, of.id > seen.newest).order_by(of.id).limit(BATCH)
        async with self._db.read() as session:
            job = await session.get(JobRow, job_id)
            if job is None:
                return False
            events = (await session.scalars(new)).all()
            who = await session.execute(
                select(ReplicaRow.id, ReplicaRow.role, ReplicaRow.index, ReplicaRow.attempt, NodeRow.name)
                .outerjoin(NodeRow, NodeRow.id == ReplicaRow.node_id)
                .where(ReplicaRow.id.in_({event.subject for event in events if event.kind == "replica"}))
            )
        subjects = {
            replica: Subject(f"{role}-{index}", {"penstock.attempt": attempt, "penstock.node": node or ""})
            for replica, role, index, attempt, node in who
        }
        of_job = {"penstock.job": job_id, "penstock.job.name": job.name, "penstock.project": job.project}
        subjects[job_id] = Subject("", of_job)
        for span in spans_of(job_id, job.name, events, subjects, seen):
            self._sink.put(span)
        goes_on = any(e.kind == "replica" and e.to_state not in TERMINAL_REPLICA for e in seen.last.values())
        is_whole = len(events) == BATCH
        if is_whole or goes_on or job.state not in TERMINAL_JOB:
            self._seen[job_id] = seen
        else:
            self._seen.pop(job_id, None)
        return is_whole

    def submitted(self, job_id: str, traceparent: str | None, since: datetime) -> None:
        """Send a submission's span: in its caller's trace, if it has named one, with a link to the job's."""
        if self._sink is None:
            return
        caller = parsed(traceparent)
        own = SpanId(caller.trace if caller else secrets.randbits(128) or 1, secrets.randbits(64) or 1)
        attributes = {"http.request.method": "POST", "http.route": "/api/v1/jobs", "penstock.job": job_id}
        self._sink.put(
            Span(own, caller, "POST /api/v1/jobs", since, self._clock.now(), attributes, None, root_of(job_id), True)
        )

    def close(self) -> None:
        """Send what is left."""
        if self._sink is not None:
            self._sink.close()
