"""Queue of telemetry in order of arrival, bounded by bytes: what does not fit is dropped, oldest first, and counted.

`DropRule`s list which kinds may be dropped, in order: those of a rule only when those of the rules before are gone.
Kinds in no rule are never dropped. Invariant: rows pushed = rows popped, discarded or held + rows counted in `dropped`.
Pure; the owner locks. Every call is O(1) amortised, but `discard` and iteration.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from penstock.protocol.frames import Kind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DropRule:
    """These kinds are dropped while more than `limit_bytes` are held; with `keep_newest` all but the newest entry."""

    kinds: frozenset[Kind]
    limit_bytes: int
    keep_newest: bool = False


class Entry(NamedTuple, Generic[T]):
    """One thing in the queue. `kind` None: never dropped. `place`: ascending in the order of the queue."""

    kind: Kind | None
    rows: int
    size_bytes: int
    item: T
    place: int


class BoundedQueue(Generic[T]):
    """`outside_bytes`: bytes that the owner holds elsewhere and that count against the limits."""

    def __init__(self, rules: Sequence[DropRule]) -> None:
        self._rules = tuple(rules)
        self._rule_of = {kind: at for at, rule in enumerate(rules) for kind in rule.kinds}
        self._queues: tuple[deque[Entry[T]], ...] = tuple(deque() for _ in range(len(rules) + 1))  # last: never dropped
        self._least_limit = min(rule.limit_bytes for rule in rules)
        self._first = self._end = 0  # places
        self.size_bytes = 0
        self.outside_bytes = 0
        self.dropped: Counter[Kind] = Counter()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def __iter__(self) -> Iterator[Entry[T]]:
        return heapq.merge(*self._queues, key=lambda entry: entry.place)

    def push(self, kind: Kind | None, rows: int, size_bytes: int, item: T) -> list[Entry[T]]:
        """Append an item; return what was dropped for it, which may be itself."""
        entry = Entry(kind, rows, size_bytes, item, self._end)
        self._end += 1
        self._queue_of(kind).append(entry)
        return self._added(entry)

    def push_front(self, kind: Kind | None, rows: int, size_bytes: int, item: T) -> list[Entry[T]]:
        """Put an item that was popped back in front of all others; return what was dropped for it."""
        self._first -= 1
        entry = Entry(kind, rows, size_bytes, item, self._first)
        self._queue_of(kind).appendleft(entry)
        return self._added(entry)

    def peek(self) -> Entry[T] | None:
        """Return the first entry, None if there is none."""
        first: Entry[T] | None = None
        for queue in self._queues:
            if queue and (first is None or queue[0].place < first.place):
                first = queue[0]
        return first

    def pop(self) -> Entry[T] | None:
        """Remove and return the first entry, None if there is none."""
        entry = self.peek()
        if entry is not None:
            self._queue_of(entry.kind).popleft()
            self.size_bytes -= entry.size_bytes
        return entry

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Remove items without counting them."""
        for queue in self._queues:
            wanted = [entry for entry in queue if not unwanted(entry.item)]
            queue.clear()
            queue.extend(wanted)
        self.size_bytes = sum(entry.size_bytes for entry in self)

    def count_dropped(self, kind: Kind, rows: int) -> None:
        """Count rows that were lost outside the queue."""
        if rows:
            self.dropped[kind] += rows

    def take_dropped(self) -> Counter[Kind]:
        """Return the rows that were dropped since the last call, by kind."""
        dropped, self.dropped = self.dropped, Counter()
        return dropped

    def _queue_of(self, kind: Kind | None) -> deque[Entry[T]]:
        return self._queues[-1 if kind is None else self._rule_of.get(kind, -1)]

    def _added(self, entry: Entry[T]) -> list[Entry[T]]:
        self.size_bytes += entry.size_bytes
        dropped: list[Entry[T]] = []
        if self.size_bytes + self.outside_bytes <= self._least_limit:
            return dropped
        for rule, queue in zip(self._rules, self._queues, strict=False):  # the last queue has no rule
            while self.size_bytes + self.outside_bytes > rule.limit_bytes and len(queue) > rule.keep_newest:
                dropped.append(queue.popleft())
                self.size_bytes -= dropped[-1].size_bytes
        for entry in dropped:
            if entry.kind is not None:  # a rule has kinds alone
                self.count_dropped(entry.kind, entry.rows)
        return dropped
