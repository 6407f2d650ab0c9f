"""Spans of a job's trace, as OpenTelemetry has them, from the events of the job. Pure.

A trace is one job. Its number is the job's identifier, and a span's number is that of the event that ends it, so a
span that is made again, after a restart of the server, is the same one:

job NAME            from its submission to its end; has an error if it failed
  QUEUED, RUNNING…  each state of the job, with the reason for which it ended
  trainer-0 RUNNING each state of a process, with its attempt and node
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from penstock.protocol.states import TERMINAL_JOB, JobState, ReplicaState
from penstock_server.tables import EventRow

_MASK = (1 << 64) - 1
_WRONG = frozenset({JobState.FAILED, ReplicaState.LOST})

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class SpanId:
    """A span: the number of its trace, of 128 bits, and its own, of 64."""

    trace: int
    span: int


@dataclass(frozen=True, slots=True)
class Span:
    """One span. `error`: what went wrong; None: nothing did."""

    id: SpanId
    parent: SpanId | None
    name: str
    start: datetime
    end: datetime
    attributes: Attributes
    error: str | None = None
    link: SpanId | None = None
    is_of_server: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """What events are about: a job, or a process of it. `name`: empty for the job."""

    name: str
    attributes: Attributes


@dataclass(slots=True)
class Seen:
    """What is known of a job's events so far. `last`: the newest change of each subject."""

    first: EventRow | None = None
    newest: str = ""
    last: dict[str, EventRow] = field(default_factory=dict)


def root_of(job_id: str) -> SpanId:
    """Return the span of a whole job."""
    return SpanId(UUID(job_id).int, UUID(job_id).int & _MASK)


def spans_of(
    job_id: str, name: str, events: Iterable[EventRow], subjects: Mapping[str, Subject], seen: Seen
) -> Iterator[Span]:
    """Yield the spans that these events end, which follow those in `seen`, in the order of their identifiers."""
    root = root_of(job_id)
    for event in events:
        seen.newest = event.id
        if event.from_state == event.to_state:  # a note
            continue
        before = seen.last.get(event.subject)
        seen.last[event.subject] = event
        subject = subjects.get(event.subject)
        if before is None or subject is None:
            if event.subject == job_id:
                seen.first = seen.first or event
            continue
        yield Span(
            SpanId(root.trace, UUID(event.id).int & _MASK), root,
            " ".join(part for part in (subject.name, before.to_state) if part),
            before.at, event.at, {**subject.attributes, "penstock.next_state": event.to_state, **_reason(event)},
            _error(event),
        )  # fmt: skip
        if event.subject == job_id and event.to_state in TERMINAL_JOB and seen.first is not None:
            ended = {**subject.attributes, "penstock.state": event.to_state, **_reason(event)}
            yield Span(root, None, f"job {name}", seen.first.at, event.at, ended, _error(event))


def _reason(event: EventRow) -> Attributes:
    return {"penstock.reason": event.reason} if event.reason else {}


def _error(event: EventRow) -> str | None:
    return (event.detail or event.reason or event.to_state) if event.to_state in _WRONG else None


def parsed(traceparent: str | None) -> SpanId | None:
    """Return the span that a W3C `traceparent` names; None for one that is malformed, or not sampled."""
    parts = (traceparent or "").strip().split("-")
    if len(parts) < 4 or [len(p) for p in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace, span, flags = (int(part, 16) for part in parts[1:4])
    except ValueError:
        return None
    return SpanId(trace, span) if trace and span and flags & 1 else None
