"""Columns of operator events as a trace source delivers them.

Invariant: all columns of one `Events` have the same length. Nothing here loops over events in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.protocol.frames import Array, Column

Ints = npt.NDArray[np.integer[Any]]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


class TraceSource(Protocol):
    """What is drained: the native engine's trace rings."""

    def drain(self) -> Mapping[str, Any]:
        """Return what happened since the last call, and forget it. Called from the drain thread only.

        Columns of equal length: `start_ns` (i64, Unix), `duration_ns` (u32), `op` (u32, position in the graph
        document), `step` (u64), `thread` (u16); and `lost`, the number of events that were overwritten. Ordered
        within a thread, not over threads. An operator's event is there before the step that it belongs to ends.
        """
        ...


@dataclass(frozen=True, slots=True)
class Events:
    """A batch of operator events, one array a column. Units: nanoseconds, Unix time."""

    start_ns: Ints
    duration_ns: Ints
    op: Ints
    step: Ints
    thread: Ints

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Events:
        """Return the events of a drained mapping. Raises KeyError if a column is missing."""
        return cls(
            np.asarray(columns["start_ns"], np.int64),
            np.asarray(columns["duration_ns"], np.uint32),
            np.asarray(columns["op"], np.intp),  # what numpy indexes with: converted once here, not in each use
            np.asarray(columns["step"], np.int64),  # signed: differences of steps are taken
            np.asarray(columns["thread"], np.uint16),
        )

    def __len__(self) -> int:
        return len(self.op)

    def select(self, rows: Index | Mask | slice) -> Events:
        """Return some of the events."""
        return Events(
            self.start_ns[rows], self.duration_ns[rows], self.op[rows], self.step[rows], self.thread[rows]
        )  # fmt: skip


def concatenate(batches: Sequence[Events]) -> Events:
    """Return all events of `batches`, which has at least one entry, in one. No copy for one batch."""
    if len(batches) == 1:
        return batches[0]
    return Events(
        np.concatenate([b.start_ns for b in batches]),
        np.concatenate([b.duration_ns for b in batches]),
        np.concatenate([b.op for b in batches]),
        np.concatenate([b.step for b in batches]),
        np.concatenate([b.thread for b in batches]),
    )


def op_sums(op: Ints, duration_ns: Ints) -> dict[Column, Array]:
    """Return the columns of an OP_SUMS frame: one row for each operator that ran, ascending.

    Totals are summed as float64, which is exact below 2^53 ns (104 days of one operator in one interval).
    """
    count = np.bincount(op)
    total_ns = np.bincount(op, weights=duration_ns)
    max_ns = np.zeros(len(count), np.uint32)
    np.maximum.at(max_ns, op, duration_ns)
    ran = np.flatnonzero(count)
    return {
        Column.OP: ran,
        Column.COUNT: count[ran],
        Column.TOTAL_NS: total_ns[ran],
        Column.MAX_NS: max_ns[ran],
    }
