"""Which of a parameter server's work is sent, as INPUT_EVENTS frames (`penstock.ps.work` records it). No thread.

All of it, while its bytes stay within a budget; beyond, all of some drains and nothing of the others, so that what is
sent is whole for a while. What is left out counts as sampled out. While all is asked for, the budget does not hold.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Protocol

import numpy as np

from penstock.protocol.exchange import MAX_LANES
from penstock.protocol.frames import FIRST_BLOCK
from penstock.telemetry.collector import Draft
from penstock.telemetry.input import Events, drafts_of, pieces_of
from penstock.telemetry.tally import Tally

BYTES_PER_S = 128 << 10
EVENT_BYTES = 11
"""Of a row of a frame."""
BURST_S = 1.0


class WorkSource(Protocol):
    """The work of one server, which may be taken from any thread."""

    def watch(self) -> None:
        """Record from now on."""

    def take(self) -> tuple[Events, int]:
        """Return the events since the last call, and how many more were lost."""
        ...

    def name(self, lane: int) -> str | None:
        """Return the block of a lane; None: it is no block's."""
        ...


class WorkWatch:
    """The servers of one process. `add`, `remove`: from any thread; the others: the drain thread's."""

    def __init__(self, tally: Tally) -> None:
        self._tally, self._lock = tally, threading.Lock()
        self._sources: dict[Hashable, WorkSource] = {}
        self._left: list[tuple[WorkSource, Events, int]] = []  # of servers that have ended
        self._lanes: dict[int, str] = {}
        self._room_bytes, self._at_ns = BYTES_PER_S * BURST_S, 0

    def add(self, key: Hashable, source: WorkSource) -> None:
        """Watch a server. `key`: what it is removed by."""
        with self._lock:
            self._sources[key] = source
        source.watch()

    def remove(self, key: Hashable) -> None:
        """Take what a server that has ended did last, and let it go."""
        with self._lock:
            source = self._sources.pop(key, None)
            if source is not None:
                self._left.append((source, *source.take()))

    def lanes(self) -> Mapping[int, str]:
        """Return the block of each lane of which events were sent, at most `MAX_LANES`."""
        return self._lanes

    def choose(self, *, step: int, now_ns: int, in_full: bool) -> list[Draft]:
        """Return the frames of what the servers did since the last call. `in_full`: whatever it takes."""
        with self._lock:
            taken, self._left = self._left, []
            taken += [(source, *source.take()) for source in self._sources.values()]
        self._room_bytes += BYTES_PER_S * max(0, now_ns - self._at_ns) / 1e9
        self._room_bytes, self._at_ns = min(self._room_bytes, BYTES_PER_S * BURST_S), now_ns
        drafts: list[Draft] = []
        for source, events, num_lost in taken:
            self._tally.produced += num_lost
            self._tally.drop("input_buffer_full", num_lost)
            drafts += self._of(source, events, step, in_full=in_full)
        return drafts

    def _of(self, source: WorkSource, events: Events, step: int, *, in_full: bool) -> list[Draft]:
        if not len(events):
            return []
        pieces = pieces_of(events.copy())
        self._tally.produced += len(pieces)
        if not in_full and self._room_bytes <= 0:
            self._tally.sampled_out += len(pieces)
            return []
        if not in_full:
            self._room_bytes -= EVENT_BYTES * len(pieces)
        for lane in np.unique(events["thread"]).tolist():
            name = source.name(lane) if lane >= FIRST_BLOCK and len(self._lanes) < MAX_LANES else None
            if name is not None:
                self._lanes[lane] = name
        return drafts_of(pieces, step)
