"""How far training has moved each weight, in a few numbers that can be compared between frameworks.

The loss alone does not show whether a contender trained all that the others did: a table of a million rows may stay as
it was without the loss of a short run leaving its band. How far each weight has moved does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bench.workloads.workload import Array, Workload

TABLE_ROWS = 1000
"""Of a table, so many rows count: the first ones that the first batch looks up. Every contender has trained it."""


@dataclass(frozen=True, slots=True)
class Movement:
    """Of the end minus the start of one weight, in float64: the sum, the root of the sum of squares, and how many.

    `start`: the root of the sum of squares of where it started. `rows` of `all_rows` have moved at all.
    """

    sum: float
    norm: float
    start: float
    size: int
    rows: int
    all_rows: int


def movements(workload: Workload, values: Mapping[str, Array]) -> dict[str, Movement]:
    """Compare `values`, laid out as the workload's own, with where they started. Raises KeyError if one is missing."""
    found = {}
    for name, start in workload.weights.items():
        rows = looked_up(workload, name) if name.startswith("table") else np.arange(len(start))
        before = start[rows].astype(np.float64)
        moved = np.asarray(values[name])[rows].astype(np.float64) - before
        in_rows = int(np.any(moved.reshape(len(rows), -1) != 0.0, axis=1).sum())
        norm, length = float(np.linalg.norm(moved)), float(np.linalg.norm(before))
        found[name] = Movement(float(moved.sum()), norm, length, moved.size, in_rows, len(rows))
    return found


def looked_up(workload: Workload, table: str) -> Array:
    """Return the rows of a table that the first batch looks up, in that order, each once, at most TABLE_ROWS."""
    slot, feeds = table.removeprefix("table"), workload.feeds
    if "history" in feeds:
        columns = feeds["target"][0], feeds["history"][0].reshape(-1, feeds["history"].shape[-1])
        ids = np.concatenate(columns)
    else:
        ids = feeds["ids"][0]
    wanted = (ids[:, int(slot)] if slot else ids).ravel()
    used = wanted[wanted != 0] if "lengths" in feeds else wanted
    return np.asarray(list(dict.fromkeys(used.tolist()))[:TABLE_ROWS], np.int64)
