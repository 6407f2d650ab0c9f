"""Completeness of a job's telemetry: what became of every row that its processes produced. Pure sums; no I/O.

The equation, for each kind of `COUNTED` and for the whole job, over its attempts, processes and restarts:

    produced = shown + sampled out + dropped, for a reason + removed by retention + not sent yet

**What a process counts** (`Report`), since its stream began: `produced`, `sampled_out`, `dropped` by reason, `held`
(not sent yet) and `sent`. Each is counted where it happens and none is derived from the others, so that the sum of a
report is a check. A row belongs to the stream that it is sent over: what waits when a process registers anew is of the
new stream.

**How it travels.** Reports are cumulative and numbered: a repeated one changes nothing, and the next one makes up for
one that is lost. They are GAP frames whose body has `counts`. An agent never drops them, and sends them again until
they are stored; older agents and servers ignore keys that they do not know. A report stands in its stream behind all
rows that it counts as sent; the last one, right before GOODBYE, is `final`. An agent's own GAP has `agent`, a name of
its run, and `total`, all that its buffer has dropped.

**What the server counts** (`StreamCounts`, stored with the job): the newest report of each process, what it refused,
what its disk did not take, and `received`: the rows that had arrived when the newest report did. What it has recorded
is not counted but read from the recording itself, so that no crash of the server makes a difference. Frames arrive in
order, so `sent - received` was lost between a process and the server: what the agents' totals have was dropped by
their buffers, and the rest was lost with a connection, or with an agent or server that was killed.

**What is unknown is marked so.** A process that ended without a final report was killed. What it produced after its
newest report and what never arrived cannot be known: its sums are lower bounds, unknown since then. Rows that arrived
after the report were certainly produced, and count. `Account.unexplained` is what the equation lacks: anything but 0
is an error of the counting, or a recording that was damaged.

METRICS and SCALARS are not counted: they are neither sampled nor recorded, they are sent until they are stored, and
step and time are their key. EXCHANGE and PROGRESS hold sums; only the newest counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.errors import PeerError
from penstock.protocol.frames import Kind

COUNTED = (Kind.OP_EVENTS, Kind.OP_SUMS, Kind.SYNC, Kind.INPUT_EVENTS)
NAMES = {kind.name: kind for kind in COUNTED}
WORDS = {
    "OP_EVENTS": "operator events",
    "OP_SUMS": "rows of operator sums",
    "SYNC": "rows of gradient exchange",
    "INPUT_EVENTS": "input events",
}
REASONS = {
    "ring_overwritten": "overwritten in the trace ring",
    "operator_index": "of operators beyond 65,535",
    "no_graph": "before their graph was known",
    "graph_too_large": "of a graph that is too large to send",
    "source_failed": "of a trace source that failed",
    "input_buffer_full": "beyond the buffer of the data feed",
    "outbox_full": "beyond the process's outbox",
    "agent_buffer_full": "beyond the agent's buffer",
    "connection": "lost with a connection, or with a killed agent or server",
    "refused": "refused by the server",
    "not_recorded": "not taken by the server's disk",
    "process_ended": "lost with their process",
    "quota": "beyond the recording's size",
    "retention": "older than the retention",
}
"""Why rows are not shown. A reason that is not here, of a newer process, is shown as it is."""
MAX_ROWS = 1 << 53
MAX_PROCESSES = 64
"""Of one stream that have a report of their own; of more, the oldest final ones are added up. Twice as many at most:
new ones beyond that are ignored, and what they send shows as unexplained."""
MAX_REASONS = 32
MAX_AGENTS = 64
EARLIER = "earlier"
_NAME = re.compile(r"[a-z0-9_]{1,32}")

Rows = dict[str, int]
"""Rows by the name of their kind; a kind without rows may be left out."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one process has counted since its stream began. `number`: ascends; -1: only its HELLO has arrived.

    `blind`: from some time on a part of it counts nothing, as its trace source failed. `at_ms`: when the server got it,
    in Unix milliseconds; `blind_ms`: the first blind one.
    """

    process: str
    number: int = -1
    final: bool = False
    blind: bool = False
    produced: Rows = field(default_factory=dict)
    sampled_out: Rows = field(default_factory=dict)
    held: Rows = field(default_factory=dict)
    sent: Rows = field(default_factory=dict)
    dropped: dict[str, Rows] = field(default_factory=dict)
    at_ms: int = 0
    blind_ms: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the body of its GAP frame."""
        return {"counts": {key: value for key, value in asdict(self).items() if key not in ("at_ms", "blind_ms")}}


def report_of(body: Any) -> Report | None:
    """Return the report in the body of a GAP; None if it has none. Raises PeerError."""
    if not isinstance(body, Mapping) or "counts" not in body:
        return None
    given = body["counts"]
    if not isinstance(given, Mapping):
        raise PeerError(f"counts are {str(given)[:80]!r}; expected an object")
    number = given.get("number")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_ROWS:
        raise PeerError(f"the number of a report of counts is {str(number)[:80]!r}; expected a whole number")
    return Report(
        process=name_of(given.get("process")),
        number=number,
        final=given.get("final") is True,
        blind=given.get("blind") is True,
        produced=rows_of(given.get("produced")),
        sampled_out=rows_of(given.get("sampled_out")),
        held=rows_of(given.get("held")),
        sent=rows_of(given.get("sent")),
        dropped=_by_reason(given.get("dropped")),
    )


def name_of(given: Any) -> str:
    """Return the name of a process, agent or reason. Raises PeerError."""
    if not isinstance(given, str) or _NAME.fullmatch(given) is None:
        raise PeerError(f"counts name {str(given)[:80]!r}; expected 1 to 32 of a-z, 0-9 and _")
    return given


def rows_of(given: Any) -> Rows:
    """Return rows by kind; kinds that are not counted are left out. Raises PeerError."""
    if not isinstance(given, Mapping):
        raise PeerError(f"rows by kind are {str(given)[:80]!r}; expected an object")
    rows = {name: given[name] for name in NAMES if name in given}
    for name, count in rows.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < MAX_ROWS:
            raise PeerError(f"rows of {name} are {str(count)[:80]!r}; expected a whole number below 2^53")
    return rows


def _by_reason(given: Any) -> dict[str, Rows]:
    if not isinstance(given, Mapping) or len(given) > MAX_REASONS:
        raise PeerError(f"dropped rows are {str(given)[:80]!r}; expected at most {MAX_REASONS} reasons")
    return {name_of(reason): rows_of(rows) for reason, rows in given.items()}


def added(parts: Iterable[Mapping[str, int]]) -> Rows:
    """Return the sum of rows."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


@dataclass(slots=True)
class StreamCounts:
    """What a server holds of one stream. Changed by `take`, `greet`, `take_agent` and `count` alone.

    `agents`: what the buffer of each run of an agent has dropped. `removed`: of a recording that retention has deleted,
    what was recorded (`recorded`) and what of it the quota had removed before (`quota`); None: it is there.
    """

    reports: dict[str, Report] = field(default_factory=dict)
    received: Rows = field(default_factory=dict)
    agents: dict[str, Rows] = field(default_factory=dict)
    refused: Rows = field(default_factory=dict)
    not_recorded: Rows = field(default_factory=dict)
    removed: dict[str, Rows] | None = None

    def greet(self, process: str, at_ms: int) -> bool:
        """Note that a process has begun; return whether it was not known."""
        if process in self.reports or self._is_full():
            return False
        self._put(Report(process, at_ms=at_ms))
        return True

    def take(self, report: Report, recorded: Mapping[str, int], at_ms: int) -> bool:
        """Take a report; `recorded`: rows of the stream that were ever recorded. Return False if it is not newer."""
        known = self.reports.get(report.process)
        if self._is_full() if known is None else report.number <= known.number:
            return False
        first_blind = known.blind_ms if known is not None and known.blind_ms is not None else at_ms
        self._put(replace(report, at_ms=at_ms, blind_ms=first_blind if report.blind else None))
        self.received = added([recorded, self.refused, self.not_recorded])
        return True

    def take_agent(self, name: str, total: Mapping[str, int]) -> bool:
        """Take what an agent's buffer has dropped in all; return whether that is more than was known."""
        known = self.agents.get(name, {})
        if (name not in self.agents and len(self.agents) >= MAX_AGENTS) or sum(total.values()) <= sum(known.values()):
            return False
        self.agents[name] = dict(total)
        return True

    def _is_full(self) -> bool:
        return len(self.reports) >= 2 * MAX_PROCESSES

    def _put(self, report: Report) -> None:
        self.reports[report.process] = report
        over = [one for one in self.reports.values() if one.final and one.process != EARLIER]
        while len(self.reports) > MAX_PROCESSES and over:
            oldest = over.pop(0)
            del self.reports[oldest.process]
            self.reports[EARLIER] = _joined(self.reports.get(EARLIER, Report(EARLIER, final=True)), oldest)

    def fields(self) -> dict[str, Any]:
        """Return it as JSON, which `stored` reads."""
        return {**asdict(self), "reports": [asdict(one) for one in self.reports.values()]}


def stored(fields: Mapping[str, Any]) -> StreamCounts:
    """Return what `StreamCounts.fields` was made of."""
    reports = [Report(**one) for one in fields["reports"]]
    return StreamCounts(**{**fields, "reports": {one.process: one for one in reports}})


def _joined(a: Report, b: Report) -> Report:
    reasons = sorted({*a.dropped, *b.dropped})
    blind = [one.blind_ms for one in (a, b) if one.blind_ms is not None]
    return Report(
        a.process, max(a.number, b.number), final=True, blind=a.blind or b.blind,
        produced=added([a.produced, b.produced]), sampled_out=added([a.sampled_out, b.sampled_out]),
        held=added([a.held, b.held]), sent=added([a.sent, b.sent]),
        dropped={reason: added([one.dropped.get(reason, {}) for one in (a, b)]) for reason in reasons},
        at_ms=max(a.at_ms, b.at_ms), blind_ms=min(blind, default=None),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the rows of one kind. `pending`: not sent yet; `dropped` and `expired`: by reason."""

    kind: str
    produced: int = 0
    shown: int = 0
    sampled_out: int = 0
    pending: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)

    @property
    def unexplained(self) -> int:
        """Rows that were produced and are nowhere, or (negative) were never produced and are shown. 0: all is well."""
        gone = sum(self.dropped.values()) + sum(self.expired.values())
        return self.produced - self.shown - self.sampled_out - self.pending - gone


def sum_of(kind: str, accounts: Iterable[Account]) -> Account:
    """Return the sum of accounts of one kind."""
    parts = list(accounts)
    return Account(
        kind,
        produced=sum(one.produced for one in parts),
        shown=sum(one.shown for one in parts),
        sampled_out=sum(one.sampled_out for one in parts),
        pending=sum(one.pending for one in parts),
        dropped=added(one.dropped for one in parts),
        expired=added(one.expired for one in parts),
    )


def account(
    counts: StreamCounts,
    kind: str,
    recorded: Mapping[str, int],
    removed: Mapping[str, int],
    *,
    ended: bool,
    continued: Collection[str] = (),
) -> Account:
    """Return what became of a stream's rows of one kind.

    `recorded`: rows that were ever recorded, `removed`: those of them that its quota has removed since. `ended`: its
    processes are gone. `continued`: names of processes that went on with a newer stream, which has what they held.
    """
    expired = {"quota": removed.get(kind, 0)}
    if counts.removed is not None:
        recorded, removed = counts.removed["recorded"], counts.removed["recorded"]
        quota = counts.removed["quota"].get(kind, 0)
        expired = {"quota": quota, "retention": removed.get(kind, 0) - quota}
    total = _Total.of(counts, kind, continued)
    here = {"refused": counts.refused.get(kind, 0), "not_recorded": counts.not_recorded.get(kind, 0)}
    lost = total.sent - counts.received.get(kind, 0)
    agent = sum(rows.get(kind, 0) for rows in counts.agents.values())
    by_agent = min(agent, max(lost, 0))
    since = max(recorded.get(kind, 0) + sum(here.values()) - counts.received.get(kind, 0), 0) + agent - by_agent
    if lost < 0 and _is_open(counts):
        since -= lost  # no report counts these yet: another process's, or behind one that a killed server got again
    left = max(total.held - since, 0)
    dropped = {**total.dropped, **here, "agent_buffer_full": agent, "connection": max(lost, 0) - by_agent}
    dropped["process_ended"] = left if ended else 0
    return Account(
        kind,
        produced=total.produced + max(since - total.held, 0),
        shown=recorded.get(kind, 0) - removed.get(kind, 0),
        sampled_out=total.sampled_out,
        pending=0 if ended else left,
        dropped={reason: rows for reason, rows in dropped.items() if rows},
        expired={reason: rows for reason, rows in expired.items() if rows},
    )


@dataclass(frozen=True, slots=True)
class _Total:
    """The sum of a stream's reports, of one kind."""

    produced: int
    sampled_out: int
    held: int
    sent: int
    dropped: dict[str, int]

    @classmethod
    def of(cls, counts: StreamCounts, kind: str, continued: Collection[str]) -> _Total:
        reports = [_without_held(one) if one.process in continued else one for one in counts.reports.values()]
        return cls(
            produced=sum(one.produced.get(kind, 0) for one in reports),
            sampled_out=sum(one.sampled_out.get(kind, 0) for one in reports),
            held=sum(one.held.get(kind, 0) for one in reports),
            sent=sum(one.sent.get(kind, 0) for one in reports),
            dropped=added({reason: rows.get(kind, 0) for reason, rows in one.dropped.items()} for one in reports),
        )


def _without_held(report: Report) -> Report:
    produced = {kind: rows - report.held.get(kind, 0) for kind, rows in report.produced.items()}
    return replace(report, produced=produced, held={})


def _is_open(counts: StreamCounts) -> bool:
    return any(not one.final for one in counts.reports.values())


def unknown_since_ms(counts: StreamCounts, *, ended: bool) -> int | None:
    """Return since when a stream's counts are lower bounds, in Unix milliseconds; None: they are not.

    `ended`: its processes are gone, or unreachable.
    """
    found = [one.blind_ms for one in counts.reports.values() if one.blind_ms is not None]
    if ended:
        found += [one.at_ms for one in counts.reports.values() if not one.final]
    return min(found, default=None)


def sentence(one: Account) -> str:
    """Return the equation in words: "produced 1,200 operator events = 800 shown + 390 sampled out + 10 dropped (…)"."""
    parts = [f"{one.shown:,} shown", f"{one.sampled_out:,} sampled out", f"{_number(one.dropped)} dropped"]
    if one.dropped:
        parts[-1] += f" ({_reasons(one.dropped)})"
    if one.expired:
        parts.append(f"{_number(one.expired)} removed by retention ({_reasons(one.expired)})")
    if one.pending:
        parts.append(f"{one.pending:,} not sent yet")
    equal = "=" if one.unexplained == 0 else "≠"
    return f"produced {one.produced:,} {WORDS[one.kind]} {equal} " + " + ".join(parts)


def _number(rows: Mapping[str, int]) -> str:
    return f"{sum(rows.values()):,}"


def _reasons(rows: Mapping[str, int]) -> str:
    largest = sorted(rows.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {REASONS.get(reason, reason)}" for reason, count in largest)
