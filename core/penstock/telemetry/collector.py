"""What one watch has to send after each drain: sums, gradient exchange, sampled steps, rows of metrics.

Pure: no thread, no socket, and the only clock is one of processor time, which it is given.

A step is *complete* when its mark is there: marks are taken before the source is drained, and a step's events are in
the source before its mark is made, so a complete step has all of its events. Steps that were never marked, though a
later one was, are runs that failed: the newest one's events are sent as they are.

Which graph a step ran is decided by `use(plan, from_step)`. Frames that index operators carry their plan, so that the
outbox can send GRAPH_USED before them. Without a plan operator indices mean nothing, and no such frame is made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.protocol.frames import COLUMNS, FLAG_IN_FULL, FLAG_WHOLE_STEP, HEADER_BYTES, Array, Column, Kind
from penstock.protocol.graphdoc import GraphDocument, GraphHash
from penstock.telemetry.events import Events, Index, Ints, Mask, concatenate, op_sums
from penstock.telemetry.metrics import ROW, Rows
from penstock.telemetry.sampling import Sampler, SlowSteps
from penstock.telemetry.sync import GraphExchanges
from penstock.telemetry.tally import Tally

EVENT_BYTES = 12
FRAME_BYTES = HEADER_BYTES + 8 * len(COLUMNS[Kind.OP_EVENTS])
MAX_ROWS = 200_000  # of one OP_EVENTS frame: 2.4 MB, so that a browser's queue holds one beside what else waits
MAX_SPAN_NS = 2**32 - 1  # of one OP_EVENTS frame: START_NS is u32
MAX_OP = 2**16 - 1  # OP is u16
LAST_STEPS = 3  # complete steps that are retained for the case of a failure

MARK = np.dtype(
    [("step", np.int64), ("start_ns", np.int64), ("end_ns", np.int64), ("samples", np.int64), ("loss", np.float64)]
)
Marks = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph document, and what is computed from it once. `trains`: it has a backward or an optimizer operator."""

    hash: GraphHash
    sync: GraphExchanges
    trains: bool

    @classmethod
    def of(cls, document: GraphDocument, graph: GraphHash) -> GraphPlan:
        """Prepare a document. Cost: O(operators + edges)."""
        trains = any(op.role in ("backward", "optimize") for op in document.ops)
        return cls(graph, GraphExchanges(document), trains)


@dataclass(frozen=True, slots=True)
class Draft:
    """A frame before it has a stream and a number. `graph`: the graph that its rows index, None if they do not."""

    kind: Kind
    columns: dict[Column, Array]
    t0_ns: int
    step: int = 0
    flags: int = 0
    graph: GraphHash | None = None


@dataclass(slots=True)
class Collected:
    """What one drain gives. `lost`: events that no frame will ever report. `rows`: one for each complete step."""

    drafts: list[Draft] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW))
    lost: int = 0
    sample_cpu_ns: int = 0  # processor time that the sampled steps cost
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Of the sampled steps, Unix nanoseconds: from the end of the step before to the end of their own."""


@dataclass(frozen=True, slots=True)
class _Complete:
    """Events of whole steps. `row`: for each event the position of its step in `steps`, which ascends."""

    steps: npt.NDArray[np.int64]
    events: Events
    row: Index


class Collector:
    """State of one watch. Owned by the drain thread. `tally`: of operator events, one for all watches of a process."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        tally: Tally | None = None,
        cpu_clock_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._sampler = sampler
        self._tally = Tally() if tally is None else tally
        self._cpu_clock_ns = cpu_clock_ns
        self._slow = SlowSteps()
        self._plans: list[tuple[int, GraphPlan]] = []  # (from_step, plan), ascending
        self._pending: list[Events] = []  # of steps that are not complete
        self._newest = -1  # newest complete step
        self._newest_end_ns: int | None = None
        self._damaged = -1  # steps up to this one may have lost events
        self._recorder: deque[_Complete] = deque()
        self._sent: set[int] = set()  # steps of the recorder that were sent

    @property
    def trains(self) -> bool:
        """True if any graph so far was one that trains."""
        return any(plan.trains for _, plan in self._plans)

    @property
    def evaluates(self) -> bool:
        """True if graphs are known, and none so far was one that trains."""
        return bool(self._plans) and not self.trains

    def use(self, plan: GraphPlan, *, from_step: int) -> None:
        """From `from_step` on, steps run this graph."""
        self._plans = [(step, old) for step, old in self._plans if step < from_step]
        self._plans.append((from_step, plan))

    def collect(self, events: Events, *, lost: int, marks: Marks, now_ns: int) -> Collected:
        """Take what a drain brought and the marks of the steps that ended before it."""
        got = Collected(lost=lost)
        self._tally.produced += len(events) + lost
        self._tally.drop("ring_overwritten", lost)
        small = events.op <= MAX_OP
        if not small.all():
            large = len(events) - int(small.sum())
            got.lost += large
            self._tally.drop("operator_index", large)
            events = events.select(small)
        if lost and len(events):
            self._damaged = max(self._damaged, int(events.step.max()))
        if len(events):
            self._hold([*self._pending, events])
            got.drafts += self._sums(events, now_ns)
        if len(marks):
            self._complete(np.sort(marks, order="step"), got, now_ns)
        return got

    def last_words(self, *, failed: bool) -> list[Draft]:
        """Return the events of a step that never ended, and, if the program failed, of the last complete ones."""
        drafts: list[Draft] = []
        if failed:
            for complete in self._recorder:
                unsent = np.array([step not in self._sent for step in complete.steps.tolist()])
                part = _restrict(complete, unsent)
                self._tally.sampled_out -= len(part.events)  # as which they were counted
                drafts += self._whole(part)
        pending = self._pending
        self.give_up()
        return drafts + (self._torn(concatenate(pending)) if pending else [])

    def give_up(self) -> None:
        """Hold no events any more."""
        self._hold([])

    def _hold(self, pending: list[Events]) -> None:
        self._tally.held += sum(map(len, pending)) - sum(map(len, self._pending))
        self._pending = pending

    def _sums(self, events: Events, now_ns: int) -> list[Draft]:
        newest = int(events.step.max())
        return [
            Draft(Kind.OP_SUMS, op_sums(part.op, part.duration_ns), now_ns, newest, graph=plan.hash)
            for plan, rows in self._by_plan(events.step)
            for part in (events if rows is None else events.select(rows),)
        ]

    def _by_plan(self, steps: npt.NDArray[np.integer]) -> Iterator[tuple[GraphPlan, Mask | None]]:
        """Return which of `steps` ran which plan; None: all of them. Steps before the first plan are left out."""
        begins = np.array([step for step, _ in self._plans], np.int64)
        low = int(np.searchsorted(begins, steps.min(), side="right")) - 1
        high = int(np.searchsorted(begins, steps.max(), side="right")) - 1
        if low == high:
            if low >= 0:
                yield self._plans[low][1], None
            return
        which = np.searchsorted(begins, steps, side="right") - 1
        for i in range(max(low, 0), high + 1):
            rows = which == i
            if rows.any():
                yield self._plans[i][1], rows

    def _complete(self, marks: Marks, got: Collected, now_ns: int) -> None:
        steps = marks["step"]
        events = concatenate(self._pending) if self._pending else None
        rows = np.zeros(len(marks), ROW)
        for name in ("step", "end_ns", "loss", "samples"):
            rows[name] = marks[name]
        rows["step_ns"] = np.maximum(marks["end_ns"] - marks["start_ns"], 0)
        if events is not None:
            complete = self._split(events, steps, got)
            whole = steps > self._damaged
            self._exchange(complete, whole, rows, got, now_ns)
            self._sample(complete, whole, rows, got)
            self._record(complete)
        got.rows = rows
        self._newest = max(self._newest, int(steps[-1]))
        self._newest_end_ns = int(rows["end_ns"][-1])
        self._forget_plans()

    def _split(self, events: Events, steps: npt.NDArray[np.int64], got: Collected) -> _Complete:
        """Take the events of complete steps out of the pending ones."""
        self._hold([])
        at, found = _position(steps, events.step)
        if found.all():
            return _Complete(steps, events, at)
        later = events.step > steps[-1]
        never = ~found & ~later
        torn = never & (events.step > self._newest)
        self._tally.sampled_out += int(never.sum() - torn.sum())
        if torn.any():
            got.drafts += self._torn(events.select(torn))
        if later.any():
            self._hold([events.select(later)])
        return _Complete(steps, events.select(found), at[found])

    def _exchange(self, complete: _Complete, whole: Mask, rows: Rows, got: Collected, now_ns: int) -> None:
        """Make the SYNC frames, and fill the sync columns of `rows`. Steps that lost events are left out."""
        for plan, ran in self._by_plan(complete.steps):
            if plan.sync.num_params == 0:
                continue
            chosen = whole if ran is None else whole & ran
            part = complete if chosen.all() else _restrict(complete, chosen)
            if len(part.steps) == 0:
                continue
            exchanged = plan.sync.exchanged(part.events, part.row, num_rows=len(part.steps))
            rows["sync_bytes"][chosen] = exchanged.ran @ plan.sync.bytes
            rows["sync_ns"][chosen] = exchanged.time_ns.sum(axis=1)
            columns = plan.sync.columns(exchanged)
            if len(columns[Column.PARAM]):
                got.drafts.append(Draft(Kind.SYNC, columns, now_ns, int(part.steps[-1]), graph=plan.hash))

    def _sample(self, complete: _Complete, whole: Mask, rows: Rows, got: Collected) -> None:
        slow = self._slow.classify(rows["step_ns"])
        counts = np.bincount(complete.row, minlength=len(complete.steps))
        offered = np.where(whole & (counts > 0), counts * EVENT_BYTES + FRAME_BYTES, 0)
        chosen = self._sampler.choose(offered, slow) & (offered > 0)
        self._tally.sampled_out += int(counts[~chosen].sum())
        if chosen.any():
            began_ns = self._cpu_clock_ns()
            got.drafts += self._whole(_restrict(complete, chosen), FLAG_IN_FULL if self._sampler.in_full else 0)
            got.turns = self._turns(rows, chosen)
            got.sample_cpu_ns += self._cpu_clock_ns() - began_ns
            self._sent.update(complete.steps[chosen].tolist())

    def _turns(self, rows: Rows, chosen: Mask) -> list[tuple[int, int]]:
        ends = rows["end_ns"]
        first = int(ends[0] - rows["step_ns"][0]) if self._newest_end_ns is None else self._newest_end_ns
        begins = np.append(first, ends[:-1])
        return list(zip(begins[chosen].tolist(), ends[chosen].tolist(), strict=True))

    def _record(self, complete: _Complete) -> None:
        """Keep the newest steps for `last_words`. No copy: the arrays of the last drains are held."""
        self._recorder.append(complete)
        held = sum(len(kept.steps) for kept in self._recorder)
        while held - len(self._recorder[0].steps) >= LAST_STEPS:
            held -= len(self._recorder.popleft().steps)
        oldest = int(self._recorder[0].steps[0])
        self._sent = {step for step in self._sent if step >= oldest}

    def _whole(self, part: _Complete, how: int = 0) -> list[Draft]:
        """Return the OP_EVENTS drafts of steps. `how`: another flag of those that are whole."""
        order = np.lexsort((part.events.start_ns, part.row))
        events, row = part.events.select(order), part.row[order]
        bounds = np.searchsorted(row, np.arange(len(part.steps) + 1))
        drafts: list[Draft] = []
        for i, step in enumerate(part.steps.tolist()):
            flags = FLAG_WHOLE_STEP | how if step > self._damaged else 0
            drafts += self._events_of(events.select(slice(bounds[i], bounds[i + 1])), step, flags)
        return drafts

    def _torn(self, events: Events) -> list[Draft]:
        """Return the OP_EVENTS drafts of the newest step in `events`, which never ended."""
        step = int(events.step.max())
        part = events.select(events.step == step)
        self._tally.sampled_out += len(events) - len(part)
        return self._events_of(part.select(np.argsort(part.start_ns, kind="stable")), step, 0)

    def _events_of(self, events: Events, step: int, flags: int) -> list[Draft]:
        """Return one draft for the events of a step, ascending by start; more only if one frame cannot hold them."""
        plan = next((plan for begin, plan in reversed(self._plans) if begin <= step), None)
        drafts: list[Draft] = []
        if plan is None:
            self._tally.drop("no_graph", len(events))
            return drafts
        while len(events):
            t0_ns = int(events.start_ns[0])
            fits = int(np.searchsorted(events.start_ns, t0_ns + MAX_SPAN_NS, side="right"))
            part, events = events.select(slice(min(fits, MAX_ROWS))), events.select(slice(min(fits, MAX_ROWS), None))
            columns: dict[Column, Array] = {
                Column.START_NS: part.start_ns - t0_ns,
                Column.DURATION_NS: part.duration_ns,
                Column.OP: part.op,
                Column.THREAD: part.thread,
            }
            drafts.append(Draft(Kind.OP_EVENTS, columns, t0_ns, step, flags, plan.hash))
        return drafts

    def _forget_plans(self) -> None:
        oldest = int(self._recorder[0].steps[0]) if self._recorder else self._newest
        current = [i for i, (begin, _) in enumerate(self._plans) if begin <= oldest]
        if current:
            del self._plans[: current[-1]]


def _position(steps: npt.NDArray[np.int64], wanted: Ints) -> tuple[Index, Mask]:
    """Return where in the ascending `steps` each of `wanted` stands, and whether it is there at all."""
    if int(steps[-1]) - int(steps[0]) + 1 == len(steps):  # no step is missing: ten times cheaper than a search
        at = wanted - steps[0]
        return at, (at >= 0) & (at < len(steps))
    at = np.searchsorted(steps, wanted)
    return at, steps[np.minimum(at, len(steps) - 1)] == wanted


def _restrict(complete: _Complete, chosen: Mask) -> _Complete:
    """Return the part of `complete` that belongs to the chosen steps."""
    new_row = np.cumsum(chosen) - 1
    keep = chosen[complete.row]
    return _Complete(complete.steps[chosen], complete.events.select(keep), new_row[complete.row[keep]])
