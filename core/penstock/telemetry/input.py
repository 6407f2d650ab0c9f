"""What the data feed does, as INPUT_EVENTS frames: reads of batches, tensors made of them, waits of threads that train.

`InputTrace` collects: threads of the feed add begin and end of their work, and native readers, which buffer their own
events, are drained with it. `InputSampler` decides what is sent: the events that overlap the *turn* of a step that was
sampled whole, from the end of the step before to its own end. An event may end after the turn, since readers work
ahead, so turns are retained for `KEPT_NS`. Other events are dropped without being counted, as steps that are not
sampled are.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.protocol.frames import FIRST_READER, Array, Column, Kind, Work
from penstock.telemetry.collector import MAX_SPAN_NS, Draft

MOST = 4096
"""Events that wait for the drain thread, and events that wait for the step that they belong to."""
KEPT_NS = 16_000_000_000
MOST_TURNS = 256
EVENT = np.dtype([("begin_ns", np.int64), ("end_ns", np.int64), ("work", np.uint8), ("thread", np.uint16)])
Events = npt.NDArray[np.void]
Turn = tuple[int, int]


class InputTrace:
    """Events of one process since the last `drain`, the newest `MOST`. Any thread adds; the drain thread takes."""

    def __init__(self) -> None:
        self._added: deque[tuple[int, int, int, int]] = deque(maxlen=MOST)
        self._readers: tuple[Callable[[], Events], ...] = ()  # replaced under the lock; read as it is
        self._lock = threading.Lock()
        self._taken: set[int] = set()

    def add(self, work: Work, thread: int, begin_ns: int, end_ns: int) -> None:
        """Add what a thread did. Times: Unix nanoseconds. `thread`: see `FIRST_READER`."""
        self._added.append((begin_ns, end_ns, work, thread))

    def claim(self, count: int) -> list[int]:
        """Return `count` numbers of `thread` for readers, the lowest that no other reader of the process has.

        Give them back with `release`, so that the next pass has the same lanes. Raises ValueError beyond 32,768.
        """
        with self._lock:
            free = (number for number in range(FIRST_READER, 2 * FIRST_READER) if number not in self._taken)
            found = list(itertools.islice(free, count))
            if len(found) < count:
                raise ValueError(f"{count} readers were added to {len(self._taken)}; at most {FIRST_READER} have lanes")
            self._taken.update(found)
            return found

    def release(self, threads: Iterable[int]) -> None:
        """Give numbers of readers that have ended back."""
        with self._lock:
            self._taken.difference_update(threads)

    def add_reader(self, reader: Callable[[], Events]) -> None:
        """Drain a reader's events, too, from now on. It is called by the drain thread."""
        with self._lock:
            self._readers = (*self._readers, reader)

    def remove_reader(self, reader: Callable[[], Events]) -> None:
        """Drain a reader, which has ended, a last time."""
        with self._lock:
            self._readers = tuple(one for one in self._readers if one != reader)
        self._added.extend(tuple(event) for event in reader().tolist())

    def drain(self) -> Events:
        """Take the events."""
        added = np.array([self._added.popleft() for _ in range(len(self._added))], EVENT)
        return np.concatenate([added, *(reader() for reader in self._readers)])


class InputSampler:
    """Chooses the events that are sent. Pure; owned by the drain thread."""

    def __init__(self) -> None:
        self._held = np.empty(0, EVENT)
        self._turns: deque[Turn] = deque(maxlen=MOST_TURNS)

    def choose(self, events: Events, sampled: Sequence[Turn], *, step: int, now_ns: int) -> list[Draft]:
        """Return the frames of events that belong to sampled steps, those of earlier calls included; each event once.

        `sampled`: of the steps that were sampled since the last call, as (begin, end).
        """
        for turn in sorted(sampled):
            self._note(turn)
        while self._turns and self._turns[0][1] < now_ns - KEPT_NS:
            self._turns.popleft()
        if not len(events) and not len(self._held):
            return []
        held = np.concatenate([self._held, events])
        chosen = _overlap(held, list(self._turns))
        rest = held[~chosen]
        self._held = rest[rest["end_ns"] > now_ns - KEPT_NS][-MOST:]
        return _drafts(held[chosen], step)

    def _note(self, turn: Turn) -> None:
        """Remember a turn; those that follow one another, as of steps that are recorded in full, are one."""
        if self._turns and self._turns[-1][1] >= turn[0] and turn[1] >= self._turns[-1][0]:
            begin, end = self._turns.pop()
            turn = (min(begin, turn[0]), max(end, turn[1]))
        self._turns.append(turn)


def _overlap(events: Events, turns: Sequence[Turn]) -> npt.NDArray[np.bool_]:
    """Return which events overlap a turn: of those that begin before its end one ends after its begin."""
    if not turns or not len(events):
        return np.zeros(len(events), np.bool_)
    bounds = np.array(sorted(turns), np.int64)
    begins, ends = bounds[:, 0], np.maximum.accumulate(bounds[:, 1])
    before = np.searchsorted(begins, events["end_ns"], side="left")
    return (before > 0) & (ends[before - 1] > events["begin_ns"])


def _drafts(events: Events, step: int) -> list[Draft]:
    """Return frames of at most `MAX_SPAN_NS`, of events in the order of time."""
    events = np.sort(_pieces(events), order="begin_ns")
    drafts: list[Draft] = []
    while len(events):
        t0_ns = int(events["begin_ns"][0])
        fits = int(np.searchsorted(events["begin_ns"], t0_ns + MAX_SPAN_NS, side="right"))
        part, events = events[:fits], events[fits:]
        columns: dict[Column, Array] = {
            Column.START_NS: part["begin_ns"] - t0_ns,
            Column.DURATION_NS: part["end_ns"] - part["begin_ns"],
            Column.WORK: part["work"],
            Column.THREAD: part["thread"],
        }
        drafts.append(Draft(Kind.INPUT_EVENTS, columns, t0_ns, step))
    return drafts


def _pieces(events: Events) -> Events:
    """Cut events that are longer than a duration may be, 4.3 s; a clock that went back makes one of no length."""
    events["end_ns"] = np.maximum(events["end_ns"], events["begin_ns"])
    pieces = [events]
    while len(long := pieces[-1][pieces[-1]["end_ns"] - pieces[-1]["begin_ns"] > MAX_SPAN_NS]):
        rest = long.copy()
        rest["begin_ns"] += MAX_SPAN_NS
        pieces.append(rest)
    for piece in pieces:
        piece["end_ns"] = np.minimum(piece["end_ns"], piece["begin_ns"] + MAX_SPAN_NS)
    return np.concatenate(pieces)
