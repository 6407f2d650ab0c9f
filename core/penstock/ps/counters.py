"""What the exchange with parameter servers cost so far: sums for each pair of peer and block. Cheap, thread-safe.

A trainer counts by endpoint, a server by trainer (`trainer 0`). Read now and then by the reporter.

Waits are wall time: while several calls are waited for, by one thread or many, each gets its equal share of the time
that passes, so the waits of all rows together are never more than the time in which anything was waited for. A thread
that blocks no step (a communicator's, a prefetch) counts none, nor do the calls that it hands to others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace

from penstock.protocol.exchange import Sums

_Key = tuple[str, str]
Counted = Callable[[], Iterable[tuple[_Key, Mapping[str, int]]]]
_NO_WAIT = nullcontext()
_counts_waits: ContextVar[bool] = ContextVar("_counts_waits", default=True)


def count_no_waits_here() -> None:
    """Count no waits of this thread from now on: no step of the trainer is blocked by it."""
    _counts_waits.set(False)


class Counters:
    """Sums by (peer, block). `block` is '' for what belongs to none (barriers, heartbeats). `clock`: nanoseconds."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._others: list[Counted] = []
        self._lock, self._clock = threading.Lock(), clock
        self._rows: dict[_Key, Sums] = {}
        self._waited_for: list[_Key] = []  # one entry for each wait that is under way
        self._shared_until = 0  # time that passed before it is shared out

    def add(self, peer: str, block: str = "", **amounts: int) -> None:
        """Add to the fields of one row, e.g. `add(endpoint, "w.block0", calls=1, sent_bytes=4096)`."""
        with self._lock:
            row = self._row((peer, block))
            _add(row, amounts)

    def waiting(self, peer: str, block: str = "") -> AbstractContextManager[None]:
        """Count the time that the body takes as a wait, shared with the others that are under way meanwhile."""
        return _Wait(self, (peer, block)) if _counts_waits.get() else _NO_WAIT

    def begin(self, key: _Key) -> None:
        """A thread waits for (peer, block) from now on; see `waiting`."""
        with self._lock:
            self._share_out()
            self._waited_for.append(key)

    def end(self, key: _Key) -> None:
        """Undo one `begin`."""
        with self._lock:
            self._share_out()
            self._waited_for.remove(key)

    def rows(self) -> dict[_Key, Sums]:
        """Return a copy of all rows; waits that are under way are in them up to now."""
        with self._lock:
            self._share_out()
            out = {key: replace(row) for key, row in self._rows.items()}
        for counted in self._others:
            for key, amounts in counted():
                _add(out.setdefault(key, Sums()), amounts)
        return out

    def also(self, counted: Counted) -> None:
        """Add to `rows` what is counted elsewhere, which `counted` returns in full each time."""
        self._others.append(counted)

    def add_merges(self, peers: Iterable[tuple[str, str]]) -> None:
        """Add a merge to each row."""
        with self._lock:
            for key in peers:
                self._row(key).merges += 1

    def _share_out(self) -> None:
        now = self._clock()
        if self._waited_for:
            share = (now - self._shared_until) // len(self._waited_for)
            for key in self._waited_for:
                self._row(key).wait_ns += share
        self._shared_until = now

    def _row(self, key: _Key) -> Sums:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Sums()
        return row


def _add(row: Sums, amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():  # cheaper than to make sums of them first
        setattr(row, name, getattr(row, name) + amount)


class _Wait:
    """One wait. A class, since a generator costs twice as much, and a step has dozens of waits."""

    __slots__ = ("_counters", "_key")

    def __init__(self, counters: Counters, key: _Key) -> None:
        self._counters, self._key = counters, key

    def __enter__(self) -> None:
        self._counters.begin(self._key)

    def __exit__(self, *_: object) -> None:
        self._counters.end(self._key)
