"""Slices of threads on lanes, so that those of one lane nest: what a trace with begins and ends can hold.

Operators of a thread run one after another, or within another (bodies of control flow). Should two overlap otherwise,
the later one goes to the thread's next lane, since on one lane its end would be taken for that of the other. State
outlives a call: the slices of a thread come in several frames. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where slices lie. `lane`: of each row, 0 first.

    `order`: rows in the order of time on each lane. `turns`: None if each slice of `order` ends before the next of its
    lane begins; else begins (row) and ends (-1 - row) in the order in which a trace has to hold them.
    """

    lane: Ints
    order: npt.NDArray[np.intp]
    turns: list[int] | None = None


@dataclass(slots=True)
class _Lane:
    """`floor`: no slice may begin before it. `ends`, `rows`: of slices that contain what comes, innermost last."""

    floor: int = -(1 << 63)
    ends: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # those of `ends` that this call has placed

    def closed_by(self, start: int) -> Iterator[int]:
        """Yield the rows that end before a slice begins, innermost first."""
        while self.ends and self.ends[-1] <= start:
            self.floor = max(self.floor, self.ends.pop())
            if self.rows:
                yield self.rows.pop()

    def takes(self, start: int, end: int) -> bool:
        """Whether a slice nests here."""
        return start >= self.floor and (not self.ends or end <= self.ends[-1])

    def add(self, start: int, end: int, row: int) -> None:
        self.floor = start
        self.ends.append(end)
        self.rows.append(row)


class Lanes:
    """Lanes of the threads of one process."""

    def __init__(self) -> None:
        self._lanes: dict[int, list[_Lane]] = {}  # by thread

    def place(self, thread: Ints, start: Ints, end: Ints) -> Placed:
        """Place slices. `thread`, `start`, `end`: one of each row, nanoseconds; `end` is not before `start`."""
        order = np.lexsort((end, start, thread))
        threads, starts, ends = thread[order], start[order], end[order]
        first = np.ones(len(order), bool)
        first[1:] = threads[1:] != threads[:-1]
        begins = np.flatnonzero(first)
        lane = np.zeros(len(order), np.int64)
        follows = first[1:] | (starts[1:] >= ends[:-1])
        if not follows.all() or not all(self._is_free(int(threads[i]), int(starts[i])) for i in begins):
            return Placed(lane, order, list(self._turns(thread, start, end, lane)))
        for last in np.append(begins[1:], len(order))[: len(begins)] - 1:
            others = self._lanes.get(int(threads[last]), [])[1:]  # a late frame may still bring what came before theirs
            self._lanes[int(threads[last])] = [_Lane(int(starts[last]), [int(ends[last])]), *others]
        return Placed(lane, order)

    def _is_free(self, thread: int, start: int) -> bool:
        return all(end <= start for lane in self._lanes.get(thread, ()) for end in (lane.floor, *lane.ends))

    def _turns(self, thread: Ints, start: Ints, end: Ints, lane: Ints) -> Iterator[int]:
        for row in np.lexsort((-end, start)).tolist():
            begins, ends = int(start[row]), int(end[row])
            lanes = self._lanes.setdefault(int(thread[row]), [])
            for i in range(len(lanes) + 1):
                if i == len(lanes):
                    lanes.append(_Lane())
                yield from (-1 - closed for closed in lanes[i].closed_by(begins))
                if lanes[i].takes(begins, ends):
                    break
            lanes[i].add(begins, ends, row)
            lane[row] = i
            yield row
        for one in (one for lanes in self._lanes.values() for one in lanes):
            yield from (-1 - row for row in reversed(one.rows))
            one.rows.clear()
