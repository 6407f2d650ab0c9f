"""Names in a folder of checkpoints, their order, and which of them are retained. Pure.

checkpoint.<attempt>.<step>   a checkpoint; it is whole, unless a disk has lost something since
unfinished.<name>.<token>     one that is being written by this claim, or was when its writer was killed
removed.<name>.<number>       one that is being removed, since newer or better ones are there, or it was never finished
replaced.<name>               one that another of the same attempt and step is about to replace
damaged.<name>                one that `restore` found damaged and passed over; it is not read

A later attempt's checkpoints are newer than those of the one before, whatever their steps: an attempt that goes on from
an older checkpoint, because the newest was damaged, takes those steps again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypeIs

Best = Literal["min", "max"]

UNFINISHED, REMOVED, REPLACED, DAMAGED = "unfinished.", "removed.", "replaced.", "damaged."
_NAME = re.compile(r"checkpoint\.(\d{6,})\.(\d{12,})")
_UNFINISHED = re.compile(re.escape(UNFINISHED) + r"checkpoint\.(\d{6,})\.\d{12,}\.[^/]+")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a checkpoint stands in the order of all. `attempt`: the number that its writer had claimed."""

    attempt: int
    step: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"checkpoint.{self.attempt:06d}.{self.step:012d}"


def place_of(name: str) -> Place | None:
    """Return the place that a folder's name gives; None for other names."""
    match = _NAME.fullmatch(name)
    return Place(int(match[1]), int(match[2])) if match else None


def unfinished(place: Place, token: str) -> str:
    """Return the name of the folder in which a claim writes a checkpoint; no other claim writes there."""
    return f"{UNFINISHED}{place.name}.{token}"


def is_leftover(name: str, attempt: int) -> bool:
    """Whether a folder is what `attempt`, or one before it, has not finished to write."""
    match = _UNFINISHED.fullmatch(name)
    return match is not None and int(match[1]) <= attempt


def to_remove(found: Iterable[tuple[Place, float | None]], *, keep: int, keep_best: int, best: Best) -> list[Place]:
    """Return what is neither among the latest `keep` nor among the best `keep_best`, of (place, metric), oldest first.

    Without a metric, or with one that is no number, nothing is among the best. Of equal ones the later is better.
    """
    ordered = sorted(found, key=lambda one: one[0])
    kept = {place for place, _ in ordered[-keep:]}
    judged = [(value if best == "max" else -value, place) for place, value in ordered if is_number(value)]
    kept |= {place for _, place in sorted(judged)[len(judged) - min(keep_best, len(judged)) :]}
    return [place for place, _ in ordered if place not in kept]


def is_number(value: float | None) -> TypeIs[float]:
    """Whether a metric can be compared."""
    return value is not None and not math.isnan(value)


def newest_first(names: Sequence[str]) -> list[Place]:
    """Return the checkpoints among names of folders."""
    return sorted((place for name in names if (place := place_of(name)) is not None), reverse=True)
