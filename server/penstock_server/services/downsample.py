"""Thin a series so that a chart of it looks the same: the extremes of each bucket stay. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def min_max(values: Sequence[float], max_points: int) -> list[int]:
    """Return ascending indices of at most `max_points` values: first, last, and each bucket's extremes.

    All indices if there are no more values than that. `max_points` below 4 counts as 4.
    """
    n = len(values)
    limit = max(4, max_points)
    if n <= limit:
        return list(range(n))
    buckets = (limit - 2) // 2
    chosen = {0, n - 1}
    for b in range(buckets):
        start, stop = 1 + b * (n - 2) // buckets, 1 + (b + 1) * (n - 2) // buckets
        if start < stop:
            chosen.add(min(range(start, stop), key=values.__getitem__))
            chosen.add(max(range(start, stop), key=values.__getitem__))
    return sorted(chosen)
