"""Tiers of a series: its lowest and highest point in intervals of 1 s, 4 s, 16 s … up to 18 hours. Pure.

A series of any length has few rows in one of the tiers, so that looking at it costs the same however long it is. Made
when points are written: `summarize` groups what is new, and remembers what it has grouped, so that only a new extreme
of an interval is written again. The result depends on the points alone, not on their order or on repetitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.protocol.stream import Points

FACTOR = 4
WIDTHS_NS = tuple(1_000_000_000 * FACTOR**level for level in range(9))
MAX_REMEMBERED = 50_000


class SeriesKey(NamedTuple):
    """A series of one attempt."""

    job_id: str
    series: str
    attempt: int


class Low(NamedTuple):
    """A point, in the order in which the lowest comes first; of equal ones the earliest."""

    value: float
    time_ns: int
    step: int


class High(NamedTuple):
    """A point, in the order in which the highest comes first; of equal ones the earliest."""

    negated: float
    time_ns: int
    step: int


@dataclass(frozen=True, slots=True)
class Extremes:
    """The lowest and the highest point of some."""

    low: Low
    high: High

    def joined(self, other: Extremes) -> Extremes:
        """Return the extremes of both."""
        return Extremes(min(self.low, other.low), min(self.high, other.high))

    def holds(self, other: Extremes) -> bool:
        """Whether the points of `other` change nothing."""
        return self.low <= other.low and self.high <= other.high


@dataclass(frozen=True, slots=True)
class Tier:
    """What is to be written of one interval."""

    key: SeriesKey
    level: int
    bucket: int
    extremes: Extremes


class Summary:
    """Extremes that are stored, of the newest interval of each series and level. Forgotten ones are written again."""

    def __init__(self) -> None:
        self._stored: dict[SeriesKey, list[tuple[int, Extremes] | None]] = {}  # by level

    def of(self, points: Mapping[SeriesKey, Points]) -> list[Tier]:
        """Return the rows that these points change. O(points)."""
        found = []
        for key, columns in points.items():
            stored = self._stored.get(key, _NONE)
            rows = zip(columns["step"], columns["time_ns"], columns["value"], strict=True)
            pairs = [
                (time_ns // WIDTHS_NS[0], Extremes(Low(value, time_ns, step), High(-value, time_ns, step)))
                for step, time_ns, value in rows
            ]
            buckets = dict(pairs) if len(pairs) == 1 else _group(pairs)
            for level in range(len(WIDTHS_NS)):
                if level:
                    wider = [(bucket // FACTOR, extremes) for bucket, extremes in buckets.items()]
                    buckets = dict(wider) if len(wider) == 1 else _group(wider)
                known = stored[level]
                for bucket, extremes in buckets.items():
                    if known is None or known[0] != bucket or not known[1].holds(extremes):
                        found.append(Tier(key, level, bucket, extremes))
        return found

    def stored(self, tiers: Iterable[Tier]) -> None:
        """Note rows that were written and committed."""
        if len(self._stored) * len(WIDTHS_NS) > MAX_REMEMBERED:
            self._stored.clear()
        for tier in tiers:
            levels = self._stored.setdefault(tier.key, [None] * len(WIDTHS_NS))
            known = levels[tier.level]
            if known is None or known[0] < tier.bucket:
                levels[tier.level] = tier.bucket, tier.extremes
            elif known[0] == tier.bucket:
                levels[tier.level] = tier.bucket, known[1].joined(tier.extremes)


_NONE: list[tuple[int, Extremes] | None] = [None] * len(WIDTHS_NS)


def level_for(span_ns: int, max_points: int) -> int:
    """Return the finest tier of which a time of `span_ns` has at most `max_points` points, two an interval."""
    for level, width in enumerate(WIDTHS_NS):
        if 2 * (span_ns // width + 2) <= max_points:
            return level
    return len(WIDTHS_NS) - 1


def _group(items: Iterable[tuple[int, Extremes]]) -> dict[int, Extremes]:
    found: dict[int, Extremes] = {}
    for bucket, extremes in items:
        known = found.get(bucket)
        found[bucket] = extremes if known is None else known.joined(extremes)
    return found
