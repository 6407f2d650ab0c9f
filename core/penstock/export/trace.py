"""A job as a trace: one track for each thread of each process, its sampled steps, its exchange; curves and events.

Every recorded operator event is one slice, of whole steps and of parts (what a process had done when it crashed) alike.
Slices have the names and categories of the dashboard, and arguments: step, operator, type, role, replica, module, the
user's line, bytes. A step is a slice from the first to the last of its events. Of parameter servers and trainers, the
exchange with each peer is a slice for each report (two a second), with what was exchanged since the one before. Readers
of the data feed, what threads do for their batches, and what servers do for each trainer, for all and with a block have
tracks of their own. Each process's own clock counts; clocks of different nodes may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from penstock.export.category import category_of
from penstock.export.lanes import Ints, Lanes, Placed
from penstock.export.peers import Interval, intervals
from penstock.export.perfetto import Arguments, Names, Texts, TraceWriter
from penstock.export.recording import MAX_POINTS, Process, Recorded, Recording, unix_ns
from penstock.protocol.exchange import lanes_of
from penstock.protocol.frames import (
    FIRST_BLOCK,
    FIRST_READER,
    FLAG_WHOLE_STEP,
    ROUNDS_LANE,
    Column,
    Frame,
    Kind,
    Work,
)
from penstock.protocol.graphdoc import GraphDocument, Op

KINDS = frozenset({Kind.OP_EVENTS, Kind.EXCHANGE, Kind.INPUT_EVENTS, Kind.GAP})
UNITS = {"step_ms": "ms", "sync_ms": "ms", "sync_bytes": "bytes", "samples_per_s": "samples/s"}
_WORKS: dict[int, str] = {
    Work.READ: "read a batch", Work.BATCH: "make tensors", Work.WAIT: "wait for a batch",
    Work.RECEIVE: "receive", Work.ROUND: "wait for the round", Work.MERGE: "merge", Work.LOG: "log",
    Work.UPDATE: "update", Work.LOOK_UP: "look up", Work.ANSWER: "answer",
}  # fmt: skip
MAX_WAITING = 256
"""Frames of a server's work that wait for the names of its blocks, which follow within half a second."""
_THREADS = 1 << 16  # numbers of threads are u16
_LATEST_NS = 1 << 62


@dataclass(slots=True)
class Summary:
    """What a trace holds. `dropped`: rows that processes could not deliver, by kind; `thinned`: series at the limit."""

    processes: int = 0
    slices: int = 0
    steps: int = 0
    exchanges: int = 0
    inputs: int = 0
    points: int = 0
    events: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    thinned: list[str] = field(default_factory=list)


def write_trace(recording: Recording, write: Callable[[bytes], object]) -> Summary:
    """Write a job's trace. `write`: takes the next bytes of the file. Raises PeerError, Unavailable."""
    summary = Summary()
    trace = TraceWriter(write, begins_ns=unix_ns(recording.job["created_at"]))
    job_track = trace.track(f"job {recording.job['name']}")
    tables = _Tables(trace, recording)
    tracks: dict[str, int] = {recording.job["id"]: job_track}
    for process in recording.processes:
        one = _ProcessTrace(trace, process, tables, summary, peers=peers_of(recording.processes, process.attempt))
        tracks[process.replica_id] = one.track
        one.add_all(recording.frames(process, KINDS))
        summary.processes += 1
    _add_series(trace, recording, job_track, summary)
    for event in recording.events():
        before = f"{event['from']} → " if event["from"] else ""
        details = {key: text for key in ("reason", "detail") if (text := str(event.get(key) or ""))}
        track = tracks.get(event["subject"], job_track)
        trace.instant(track, unix_ns(event["at"]), before + event["to"], "event", details)
        summary.events += 1
    return summary


def peers_of(processes: Sequence[Process], attempt: int) -> dict[str, str]:
    """Return the name of each parameter server of an attempt, by its endpoint."""
    return {one.endpoint: one.name for one in processes if one.endpoint is not None and one.attempt == attempt}


def _add_series(trace: TraceWriter, recording: Recording, parent: int, summary: Summary) -> None:
    for name, series in recording.series().items():
        times, values = np.array(series["time_ns"], np.int64), np.array(series["value"], np.float64)
        if len(values):
            trace.values(trace.counter(name, UNITS.get(name.split(".")[0], ""), parent), np.maximum(times, 0), values)
        summary.points += len(values)
        if len(values) >= MAX_POINTS:
            summary.thinned.append(name)


class _Tables:
    """Interned names of the operators of each graph, one array for each property."""

    def __init__(self, trace: TraceWriter, recording: Recording) -> None:
        self._trace, self._recording = trace, recording
        self._made: dict[str | None, _Operators] = {}

    def of(self, graph: str | None) -> _Operators:
        """Return the operators of a graph; of one that is not known, a single operator without properties."""
        if graph not in self._made:
            document = None if graph is None else self._recording.document(graph)
            self._made[graph] = _operators(self._trace, document)
        return self._made[graph]


@dataclass(frozen=True, slots=True)
class _Operators:
    """Arrays by operator; the last row stands for what the document does not have."""

    name: Ints
    category: Ints
    bytes: Ints
    texts: dict[str, Ints]

    def rows(self, op: Ints) -> Ints:
        return np.minimum(op, len(self.name) - 1)


def _operators(trace: TraceWriter, document: GraphDocument | None) -> _Operators:
    ops: list[Op | None] = [*(document.ops if document else ()), None]

    def numbers(kind: Names, of: Callable[[Op], str], unknown: str = "") -> Ints:
        return np.array([trace.intern(kind, unknown if op is None else of(op)) for op in ops], np.int64)

    texts = {
        "type": numbers(Names.TEXT, lambda op: op.type),
        "role": numbers(Names.TEXT, lambda op: op.role),
        "replica": numbers(Names.TEXT, lambda op: "all" if op.replica < 0 else str(op.replica)),
        "module": numbers(Names.TEXT, lambda op: op.module),
        "line": numbers(Names.TEXT, lambda op: op.source),
    }
    return _Operators(
        numbers(Names.EVENT, lambda op: op.name, "unknown operator"),
        numbers(Names.CATEGORY, category_of, "unknown"),
        np.array([0 if op is None else max(op.bytes, 0) for op in ops], np.int64),
        texts,
    )


@dataclass(slots=True)
class _Step:
    """A step of which frames come."""

    step: int
    start_ns: int
    end_ns: int
    whole: bool


class _ProcessTrace:
    """The tracks of one process."""

    def __init__(
        self, trace: TraceWriter, process: Process, tables: _Tables, summary: Summary, *, peers: Mapping[str, str]
    ) -> None:
        self._trace, self._process, self._tables, self._summary = trace, process, tables, summary
        self._peers = peers
        labels = [f"attempt {process.attempt}", f"host {process.host}"]
        labels += [] if process.pid is None else [f"pid {process.pid}"]
        labels += [] if process.endpoint is None else [f"endpoint {process.endpoint}"]
        self.track = trace.process(process.number, process.name, tuple(labels))
        self._lanes = Lanes()
        self._other_lanes: dict[str, Lanes] = {}
        self._tracks: dict[tuple[str, int], int] = {}
        self._blocks: dict[int, str] = {}  # of a server, by lane
        self._step: _Step | None = None
        self._last_ns = process.started_ns or 0

    def add_all(self, recorded: Iterator[Recorded]) -> None:
        """Write what was recorded of the process."""
        exchanged: list[Frame] = []
        work: list[Frame] = []  # of which the next EXCHANGE may name the blocks
        for one in recorded:
            match one.frame.kind:
                case Kind.OP_EVENTS:
                    if one.frame.count:
                        self._add_events(one.frame, one.graph)
                case Kind.EXCHANGE:
                    self._blocks |= lanes_of(one.frame.body)
                    self._add_work(work)
                    self._add_exchange([*exchanged, one.frame])
                    exchanged = [one.frame]
                case Kind.INPUT_EVENTS:
                    work.append(one.frame)
                    if self._process.role != "pserver" or len(work) >= MAX_WAITING:
                        self._add_work(work)
                case Kind.GAP:
                    self._add_gap(one.frame)
        self._add_work(work)
        self._end_step()

    def _add_work(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._add_input(frame)
        frames.clear()

    def _add_events(self, frame: Frame, graph: str | None) -> None:
        t0_ns = min(max(frame.t0_ns, 0), _LATEST_NS)
        start = t0_ns + frame.columns[Column.START_NS].astype(np.int64)
        end = start + frame.columns[Column.DURATION_NS].astype(np.int64)
        thread, op = (frame.columns[c].astype(np.int64) for c in (Column.THREAD, Column.OP))
        operators = self._tables.of(graph)
        row = operators.rows(op)
        texts = {name: Texts(numbers[row]) for name, numbers in operators.texts.items()}
        args: Arguments = {"step": frame.step, "operator": op, **texts, "bytes": operators.bytes[row]}
        placed = self._lanes.place(thread, start, end)
        track = self._thread_tracks(thread, placed)
        self._trace.slices(placed, track, start, end, operators.name[row], operators.category[row], args)
        self._summary.slices += frame.count
        self._last_ns = int(end.max())
        self._note_step(frame, int(start.min()), self._last_ns)

    def _thread_tracks(self, thread: Ints, placed: Placed) -> Ints:
        """Return the track of each slice."""
        keys = placed.lane * _THREADS + thread
        found, at = np.unique(keys, return_inverse=True)
        tracks = [self._thread_track(int(key) % _THREADS, int(key) // _THREADS) for key in found]
        return np.array(tracks, np.int64)[at]

    def _thread_track(self, thread: int, lane: int) -> int:
        if lane == 0 and ("thread", thread) not in self._tracks:
            pid, name = self._process.number, f"thread {thread}"
            self._tracks["thread", thread] = self._trace.thread(pid, pid * _THREADS + thread, name, self.track)
        return self._named_track(f"thread {thread}, overlapping", lane) if lane else self._tracks["thread", thread]

    def _named_track(self, name: str, lane: int = 0) -> int:
        if (name, lane) not in self._tracks:
            shown = f"{name} {lane + 1}" if lane else name
            self._tracks[name, lane] = self._trace.track(shown, self.track)
        return self._tracks[name, lane]

    def _note_step(self, frame: Frame, start_ns: int, end_ns: int) -> None:
        whole = bool(frame.flags & FLAG_WHOLE_STEP)
        if self._step is None or self._step.step != frame.step:
            self._end_step()
            self._step = _Step(frame.step, start_ns, end_ns, whole)
            return
        self._step.start_ns, self._step.end_ns = min(self._step.start_ns, start_ns), max(self._step.end_ns, end_ns)
        self._step.whole &= whole

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        args: Arguments = {"step": step.step, "complete": Texts(self._text("yes" if step.whole else "no"))}
        self._add_slice("steps", f"step {step.step}", "step", step.start_ns, step.end_ns, args)
        self._summary.steps += 1

    def _add_input(self, frame: Frame) -> None:
        t0_ns = min(max(frame.t0_ns, 0), _LATEST_NS)
        columns = (Column.START_NS, Column.DURATION_NS, Column.WORK, Column.THREAD)
        for start, duration, work, thread in zip(*(frame.columns[c].tolist() for c in columns), strict=True):
            is_server = work >= Work.RECEIVE
            track = self._server_track(thread) if is_server else _feed_track(thread)
            category = "server" if is_server else "input"
            begin = t0_ns + start
            self._add_slice(track, _WORKS.get(work, f"work {work}"), category, begin, begin + duration, {})
        self._summary.inputs += frame.count

    def _server_track(self, thread: int) -> str:
        if thread == ROUNDS_LANE:
            return "updates"
        if thread < FIRST_BLOCK:
            return f"trainer {thread}"
        return f"block {self._blocks.get(thread, thread - FIRST_BLOCK)}"

    def _add_exchange(self, frames: list[Frame]) -> None:
        for one in intervals(frames, self._process.started_ns):
            self._add_interval(one)
            self._summary.exchanges += 1

    def _add_interval(self, one: Interval) -> None:
        args: Arguments = asdict(one.sums)
        name = f"exchange with {self._peers.get(one.peer, one.peer)}"
        self._add_slice(name, name, "communication", one.start_ns, one.end_ns, args)

    def _add_slice(self, track: str, name: str, category: str, start_ns: int, end_ns: int, args: Arguments) -> None:
        start, end = np.array([start_ns]), np.array([end_ns])
        placed = self._other_lanes.setdefault(track, Lanes()).place(np.zeros(1, np.int64), start, end)
        tracks = np.array([self._named_track(track, int(placed.lane[0]))])
        names = np.array([self._trace.intern(Names.EVENT, name)])
        categories = np.array([self._trace.intern(Names.CATEGORY, category)])
        self._trace.slices(placed, tracks, start, end, names, categories, args)

    def _add_gap(self, frame: Frame) -> None:
        dropped = {str(kind): rows for kind, rows in dict(frame.body or {}).items() if type(rows) is int and rows > 0}
        total = Counter(self._summary.dropped)
        total.update(dropped)
        self._summary.dropped = dict(total)
        texts = {kind: f"{rows} rows" for kind, rows in dropped.items()}
        self._trace.instant(self.track, frame.t0_ns if frame.t0_ns > 0 else self._last_ns, "dropped", "loss", texts)

    def _text(self, text: str) -> int:
        return self._trace.intern(Names.TEXT, text)


def _feed_track(thread: int) -> str:
    return f"reader {thread - FIRST_READER}" if thread >= FIRST_READER else f"batches {thread}"
