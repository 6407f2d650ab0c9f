"""Frames on their way out: bounded, numbered, with an account of what was dropped. Pure; the owner locks.

Frames are taken in the order of arrival. Over the limit OP_EVENTS are dropped oldest first, then OP_SUMS and SYNC;
METRICS, SCALARS, GRAPH and GOODBYE are not, except that beyond `last_resort_bytes` (a peer that is unreachable for
days) the oldest METRICS and SCALARS go too, since memory is finite. A GAP holds what was dropped. PROGRESS and
EXCHANGE each hold all that those before it held: only the newest waits, and it is never dropped.

Sequence numbers are given when a frame is taken, and given back if it could not be sent, so the numbers that a peer
sees have a hole only where frames were lost on the way. HELLO, GRAPH and GRAPH_USED are made when they are due on the
connection at hand: a new connection starts with HELLO, and each graph goes before the first frame that indexes it.
With a peer that confirms, METRICS, SCALARS, PROGRESS and EXCHANGE are kept until it has stored them (the newest 4 MiB),
and go again, under new numbers, over the next connection; a repeated value is harmless, since its step and time are
its key.
Invariant: rows put in = rows taken + rows counted as dropped + rows still held.
An outbox that has the name of its process also makes the reports of `protocol.completeness`, from what it counts and
what was counted before it (`counted`): when one is due, and right before GOODBYE.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock.protocol.bounded import BoundedQueue, DropRule, Entry
from penstock.protocol.frames import Frame, Kind, encode
from penstock.protocol.graphdoc import GraphHash, Threads
from penstock.telemetry.collector import Draft
from penstock.telemetry.outcome import Outcome
from penstock.telemetry.reports import Reports
from penstock.telemetry.tally import Tally

LIMIT_BYTES = 16 << 20
LAST_RESORT_BYTES = 64 << 20
KEEP_BYTES = 4 << 20  # sent, not yet confirmed
REPLACED = (Kind.PROGRESS, Kind.EXCHANGE)  # by a newer one
KEPT = frozenset({Kind.METRICS, Kind.SCALARS, *REPLACED})
MAX_GRAPHS = 16  # documents kept for the next connection; a feed shape each
PREFIX = struct.Struct("<I")  # length, on a Unix socket
STAMP = struct.Struct("<IIQ")  # stream, epoch, seq: bytes 8 to 24 of the header
STAMP_AT = PREFIX.size + 8
_EVENTS, _SUMS = frozenset({Kind.OP_EVENTS, Kind.INPUT_EVENTS}), frozenset({Kind.OP_SUMS, Kind.SYNC})
_VITAL = frozenset(Kind) - _EVENTS - _SUMS


@dataclass(frozen=True, slots=True)
class Parcel:
    """One frame, encoded behind its length prefix. `queued`: it waited in the queue; others are made when due."""

    kind: Kind
    rows: int
    data: bytearray
    graph: GraphHash | None = None
    queued: bool = False
    dropped: Counter[Kind] | None = None

    @property
    def frame(self) -> memoryview:
        """The frame without its prefix: one websocket message."""
        return memoryview(self.data)[PREFIX.size :]


def parcel(frame: Frame, graph: GraphHash | None = None) -> Parcel:
    """Encode a frame. Raises ValueError if it is too large."""
    encoded = encode(frame)
    return Parcel(frame.kind, frame.count, bytearray(PREFIX.pack(len(encoded)) + encoded), graph)


def pack(draft: Draft) -> Parcel:
    """Encode a draft; stream, epoch and number come later."""
    return parcel(
        Frame(draft.kind, 0, 0, 0, draft.t0_ns, draft.step, draft.flags, draft.columns), draft.graph
    )  # fmt: skip


def message(kind: Kind, body: dict[str, Any], *, t0_ns: int = 0) -> Parcel:
    """Encode a JSON frame."""
    return parcel(Frame(kind, 0, 0, 0, t0_ns, body=body))


class Outbox:
    """What one process has to send. `process`: its name in reports of counts; None: it makes none."""

    def __init__(
        self,
        *,
        process: str | None = None,
        limit_bytes: int = LIMIT_BYTES,
        last_resort_bytes: int = LAST_RESORT_BYTES,
    ) -> None:
        self._reports = None if process is None else Reports(process)
        self._queue = BoundedQueue[Parcel](
            [
                DropRule(_EVENTS, limit_bytes),
                DropRule(_SUMS, limit_bytes),
                DropRule(_VITAL, last_resort_bytes, keep_newest=True),
            ]
        )
        self._newest: dict[Kind, Parcel] = {}  # of REPLACED
        self._hello: dict[str, Any] | None = None
        self._graphs: OrderedDict[GraphHash, Parcel] = OrderedDict()
        self._too_large: set[GraphHash] = set()
        self._threads: dict[GraphHash, Threads] = {}  # of those in `_graphs`
        self._announced: deque[GraphHash] = deque()
        self._stream, self._epoch, self._seq = 0, 0, 0
        self._keeps = False
        self._kept: deque[tuple[int, Parcel]] = deque()  # (seq, frame), ascending
        self._kept_size = 0
        self._sent_hello = False
        self._sent_graphs: set[GraphHash] = set()
        self._used: GraphHash | None = None  # on this connection
        self._current: GraphHash | None = None  # newest that was used or announced first

    @property
    def size_bytes(self) -> int:
        """Bytes in the queues."""
        return self._queue.size_bytes

    @property
    def empty(self) -> bool:
        """True if nothing waits but what only a new connection would need."""
        due = self._reports is not None and self._reports.due
        return not (
            self._queue or self._newest or self._announced or self._queue.dropped or not self._sent_hello or due
        )

    def introduce(self, hello: dict[str, Any]) -> None:
        """Set the body of HELLO; it is sent again if a connection has already had another one."""
        self._sent_hello = self._sent_hello and hello == self._hello
        self._hello = hello

    def connected(self, *, stream: int, epoch: int, keeps: bool = False) -> None:
        """Start a connection: its peer knows nothing yet. Numbers start again only for another stream or epoch.

        `keeps`: its peer confirms by `stored`.
        """
        while self._kept:
            _, item = self._kept.pop()
            self._again(item)
        self._kept_size = 0
        self._keeps = keeps
        if (stream, epoch) != (self._stream, self._epoch):
            self._seq = 0
            if self._reports is not None:
                self._reports.begin()
        if self._reports is not None:
            self._reports.connected()
        self._stream, self._epoch = stream, epoch
        self._sent_hello = False
        self._sent_graphs.clear()
        self._used = None
        if self._current is not None:
            self._announced.appendleft(self._current)

    def announce(self, graph: GraphHash, document: dict[str, Any], threads: Threads | None = None) -> None:
        """Take a graph document; it is sent once on each connection. `threads`: what runs it, None if that is unknown.

        Raises ValueError if it is too large; then frames that index it are dropped and counted, since no reader could
        read them.
        """
        try:
            self._graphs[graph] = message(Kind.GRAPH, document)
        except ValueError:
            self._too_large.add(graph)
            raise
        if threads is not None:
            self._threads[graph] = threads
        while len(self._graphs) > MAX_GRAPHS:
            self._threads.pop(self._graphs.popitem(last=False)[0], None)
        self._announced.append(graph)

    def knows(self, graph: GraphHash) -> bool:
        """True if the document need not be announced."""
        return graph in self._graphs or graph in self._too_large

    def put(self, item: Parcel) -> None:
        """Take a frame. Drops others, or this one, if there is no room. Of REPLACED a newer replaces the older."""
        if item.kind in REPLACED:
            self._newest[item.kind] = item
            return
        if self._reports is not None:
            self._reports.put(item.kind, item.rows)
        if item.graph in self._too_large:
            self._queue.count_dropped(item.kind, item.rows)
            self._lose("graph_too_large", item.kind, item.rows)
            return
        self._push(self._queue.push(item.kind, item.rows, len(item.data), replace(item, queued=True)))

    def count_dropped(self, kind: Kind, rows: int) -> None:
        """Account for rows that never came here."""
        self._queue.count_dropped(kind, rows)

    def counted(self, kind: Kind, tally: Tally) -> None:
        """Note what became of a kind's rows until they were put in here; of other kinds all rows are."""
        if self._reports is not None:
            self._reports.counted[kind] = tally

    def report(self) -> None:
        """Have a report of counts sent next, if it differs from the last."""
        if self._reports is not None:
            self._reports.ask(self._held_rows())

    def _push(self, dropped: list[Entry[Parcel]]) -> None:
        for entry in dropped:
            self._lose("outbox_full", entry.item.kind, entry.rows)

    def _lose(self, reason: str, kind: Kind, rows: int) -> None:
        if self._reports is not None:
            self._reports.lose(reason, kind, rows)

    def _held_rows(self) -> Counter[Kind]:
        held: Counter[Kind] = Counter()
        for entry in self._queue:
            held[entry.item.kind] += entry.rows
        return held

    def take(self) -> Parcel | None:
        """Return the next frame, numbered, or None. It counts as sent unless it comes back by `put_back`."""
        item = self._next()
        if item is None:
            return None
        if self._reports is not None and item.queued:
            self._reports.sent(item.kind, item.rows)
        if self._keeps and item.kind in KEPT:
            self._kept.append((self._seq, item))
            self._kept_size += len(item.data)
            while self._kept_size > KEEP_BYTES:
                self._kept_size -= len(self._kept.popleft()[1].data)
        return self._stamped(item)

    def stored(self, seq: int | None) -> None:
        """Let go of what the peer has stored, up to and with `seq`; None: of everything."""
        while self._kept and (seq is None or self._kept[0][0] <= seq):
            self._kept_size -= len(self._kept.popleft()[1].data)

    def farewell(self) -> list[Parcel]:
        """Return the last report and a GOODBYE for this connection alone, numbered."""
        last = [] if self._reports is None else [self._reports.last(self._held_rows())]
        bodies = [(Kind.GAP, body) for body in last] + [(Kind.GOODBYE, Outcome().body())]
        return [self._stamped(message(kind, body)) for kind, body in bodies]

    def _stamped(self, item: Parcel) -> Parcel:
        STAMP.pack_into(item.data, STAMP_AT, self._stream, self._epoch, self._seq)
        self._seq += 1
        return item

    def put_back(self, item: Parcel) -> None:
        """Undo the last `take`: its connection broke, and the next one starts anew."""
        self._seq -= 1
        if self._reports is not None and item.queued:
            self._reports.sent(item.kind, -item.rows)
        if self._kept and self._kept[-1][1] is item:
            self._kept_size -= len(self._kept.pop()[1].data)
        if item.dropped is not None:
            self._queue.dropped.update(item.dropped)
        else:
            self._again(item)

    def _again(self, item: Parcel) -> None:
        """Queue a frame that was taken in front of those that were not."""
        if item.kind in REPLACED:
            self._newest.setdefault(item.kind, item)
        elif item.queued:
            self._push(self._queue.push_front(item.kind, item.rows, len(item.data), item))

    def _next(self) -> Parcel | None:
        if not self._sent_hello:
            if self._hello is None:
                return None
            self._sent_hello = True
            return message(Kind.HELLO, self._hello)
        return (
            self._next_announced()
            or self._next_gap()
            or self._next_report()
            or self._next_newest()
            or self._next_queued()
        )

    def _next_report(self) -> Parcel | None:
        if self._reports is None or not self._reports.due:
            return None
        return message(Kind.GAP, self._reports.next(self._held_rows()))

    def _next_newest(self) -> Parcel | None:
        return self._newest.pop(next(iter(self._newest))) if self._newest else None

    def _next_queued(self) -> Parcel | None:
        first = self._queue.peek()
        if first is None:
            return None
        due = self._due_before(first.item.graph)
        if due is None and first.kind is Kind.GOODBYE and self._reports is not None and not self._reports.is_over:
            due = message(Kind.GAP, self._reports.last(self._held_rows()))
        if due is None:
            self._queue.pop()
        return due or first.item

    def _next_announced(self) -> Parcel | None:
        while self._announced:
            graph = self._announced[0]
            if graph not in self._sent_graphs and graph in self._graphs:
                return self._say_graph(graph)
            self._announced.popleft()
            if self._used is None:  # so that a page can draw the graph before its first step has ended
                return self._say_used(graph)
        return None

    def _next_gap(self) -> Parcel | None:
        if not self._queue.dropped:
            return None
        dropped = self._queue.take_dropped()
        gap = message(Kind.GAP, {kind.name: rows for kind, rows in sorted(dropped.items())})
        return Parcel(gap.kind, gap.rows, gap.data, dropped=dropped)

    def _due_before(self, graph: GraphHash | None) -> Parcel | None:
        """Return what must be said before a frame that indexes `graph`."""
        if graph is None:
            return None
        if graph not in self._sent_graphs and graph in self._graphs:
            return self._say_graph(graph)
        return self._say_used(graph) if graph != self._used else None

    def _say_graph(self, graph: GraphHash) -> Parcel:
        self._sent_graphs.add(graph)
        kept = self._graphs[graph]
        return Parcel(kept.kind, kept.rows, bytearray(kept.data))

    def _say_used(self, graph: GraphHash) -> Parcel:
        self._used = self._current = graph
        threads = self._threads.get(graph)
        return message(Kind.GRAPH_USED, {"hash": graph, **(threads.body() if threads is not None else {})})

    def held(self) -> Iterator[Parcel]:
        """Yield what is in the queues."""
        return (entry.item for entry in self._queue)
