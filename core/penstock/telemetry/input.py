"""What the data feed does, as INPUT_EVENTS frames: reads of batches, tensors made of them, waits of threads that train.

`InputTrace` collects: threads of the feed add begin and end of their work, and native readers, which buffer their own
events, are drained with it. `InputSampler` decides what is sent: the events that overlap the *turn* of a step that was
sampled whole, from the end of the step before to its own end. An event may end after the turn, since readers work
ahead, so turns are retained for `KEPT_NS`. Other events are sampled out, as steps that are not sampled are; what is
beyond `MOST` is dropped. Both are counted.
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
from penstock.telemetry.tally import Tally

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
        self._overwritten = 0
        self._readers: tuple[Callable[[], Events], ...] = ()  # replaced under the lock; read as it is
        self._lock = threading.Lock()
        self._taken: set[int] = set()

    def add(self, work: Work, thread: int, begin_ns: int, end_ns: int) -> None:
        """Add what a thread did. Times: Unix nanoseconds. `thread`: see `FIRST_READER`."""
        with self._lock:
            self._append([(begin_ns, end_ns, work, thread)])

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
        last = [tuple(event) for event in reader().tolist()]
        with self._lock:
            self._append(last)

    def _append(self, events: Sequence[tuple[int, int, int, int]]) -> None:
        self._overwritten += max(0, len(self._added) + len(events) - MOST)
        self._added.extend(events)

    def drain(self) -> Events:
        """Take the events."""
        with self._lock:
            added = np.array(self._added, EVENT)
            self._added.clear()
        return np.concatenate([added, *(reader() for reader in self._readers)])

    def take_overwritten(self) -> int:
        """Return how many events were added since the last call and will never be drained, as too many waited."""
        with self._lock:
            overwritten, self._overwritten = self._overwritten, 0
        return overwritten


class InputSampler:
    """Chooses the events that are sent. Pure; owned by the drain thread."""

    def __init__(self) -> None:
        self.tally = Tally()
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
        recent = rest[rest["end_ns"] > now_ns - KEPT_NS]
        self._held = recent[-MOST:]
        pieces = pieces_of(held[chosen])
        self._count(len(events) + len(pieces) - int(chosen.sum()), len(rest) - len(recent), len(recent))
        return drafts_of(pieces, step)

    def overwritten(self, num: int) -> None:
        """Count events that never came here."""
        self.tally.produced += num
        self.tally.drop("input_buffer_full", num)

    def failed(self) -> InputSampler:
        """Return another one in place of this, which failed: what it held is dropped."""
        other = InputSampler()
        other.tally = self.tally
        other.tally.held = 0
        other.tally.fail()
        return other

    def end(self) -> None:
        """No step is sampled any more: what is held is sampled out."""
        self.tally.sampled_out += len(self._held)
        self._held = self._held[:0]
        self.tally.held = 0

    def _count(self, new: int, passed_by: int, recent: int) -> None:
        self.tally.produced += new
        self.tally.sampled_out += passed_by
        self.tally.drop("input_buffer_full", recent - len(self._held))
        self.tally.held = len(self._held)

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


def drafts_of(events: Events, step: int) -> list[Draft]:
    """Return frames of at most `MAX_SPAN_NS`, of events that are no longer, in the order of time."""
    events = np.sort(events, order="begin_ns")
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


def pieces_of(events: Events) -> Events:
    """Cut events that are longer than a duration may be, 4.3 s; a clock that went back makes one of no length.

    `events`: changed.
    """
    events["end_ns"] = np.maximum(events["end_ns"], events["begin_ns"])
    pieces = [events]
    while len(long := pieces[-1][pieces[-1]["end_ns"] - pieces[-1]["begin_ns"] > MAX_SPAN_NS]):
        rest = long.copy()
        rest["begin_ns"] += MAX_SPAN_NS
        pieces.append(rest)
    for piece in pieces:
        piece["end_ns"] = np.minimum(piece["end_ns"], piece["begin_ns"] + MAX_SPAN_NS)
    return np.concatenate(pieces)
