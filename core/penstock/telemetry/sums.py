"""Per-operator accumulators of one interval. Pure; cost O(events + largest operator index)."""

from __future__ import annotations

import numpy as np

from penstock.protocol.frames import Array, Column
from penstock.telemetry.events import Ints


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
