"""Budgets of restarts: all that a job ever took, or those of a sliding window alone; of a class, or of the rest. Pure.

With `restart.window_s` a restart that is older than the window counts no more, so a job that runs for weeks is not
ended by the fourth fault of a machine in a month, and one that fails again and again still is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Budget:
    """Restarts that count now, and how many may. `retry_class`: for which alone; "": for all without their own."""

    taken: int
    most: int
    window_s: float | None = None
    retry_class: str = ""

    @property
    def left(self) -> int:
        """Return how many may be taken."""
        return max(0, self.most - self.taken)

    def next(self) -> str:
        """Describe the next restart."""
        within = "" if self.window_s is None else f" within {self.window_s:g} s"
        alone = f" for {self.retry_class}" if self.retry_class else ""
        return f"restart {self.taken + 1} of {self.most}{within}{alone}"


ByClass = Mapping[str, Mapping[str, Any]]
"""What a job took from budgets of classes: of each how many, and when those that count in its window (ISO 8601)."""
_NONE: Mapping[str, Any] = {"taken": 0, "at": []}


def recent(taken_at: Sequence[str], window_s: float | None, now: datetime) -> list[str]:
    """Return the times, ISO 8601, of the restarts that count at `now`. Without a window none is recorded.

    One later than `now` counts: the clock was set back since.
    """
    if window_s is None:
        return []
    since = now - timedelta(seconds=window_s)
    return [at for at in taken_at if datetime.fromisoformat(at) > since]


def taken(restarts: int, taken_at: Sequence[str], window_s: float | None, now: datetime) -> int:
    """Return how many restarts count against `max_restarts` at `now`. `restarts`: all that the job ever took."""
    return restarts if window_s is None else len(recent(taken_at, window_s, now))


def charged(taken_at: Sequence[str], window_s: float | None, at: datetime) -> list[str]:
    """Return the times to record once a restart was taken at `at`: at most as many as `max_restarts` allows."""
    return [] if window_s is None else [*recent(taken_at, window_s, at), at.isoformat()]


def shared(
    restart: Mapping[str, Any], restarts: int, taken_at: Sequence[str], by_class: ByClass, now: datetime
) -> Budget:
    """Return the budget of classes that have none of their own. `restart`: of the job's description."""
    window_s = restart.get("window_s")
    of_others = sum(int(one["taken"]) for one in by_class.values())
    return Budget(taken(restarts - of_others, taken_at, window_s, now), int(restart.get("max_restarts", 0)), window_s)


def own(restart: Mapping[str, Any], by_class: ByClass, now: datetime) -> dict[str, Budget]:
    """Return the budgets of classes that have one."""
    return {
        name: Budget(
            _taken_of(by_class.get(name), one.get("window_s"), now), one["max_restarts"], one.get("window_s"), name
        )
        for name, one in _limits(restart).items()
    }


def has_own(restart: Mapping[str, Any], retry_class: str) -> bool:
    """Whether restarts of a class are counted apart."""
    return retry_class in _limits(restart)


def pauses(restart: Mapping[str, Any], retry_class: str) -> tuple[timedelta, timedelta] | None:
    """Return the first and the longest pause before attempts of a class that has a budget of its own."""
    one = _limits(restart).get(retry_class)
    if one is None:
        return None
    return timedelta(seconds=one["first_pause_s"]), timedelta(seconds=one["longest_pause_s"])


def charged_to(restart: Mapping[str, Any], by_class: ByClass, retry_class: str, at: datetime) -> dict[str, Any]:
    """Return what to record once a restart was taken at `at` from the budget of a class."""
    before = by_class.get(retry_class, _NONE)
    times = charged(before["at"], _limits(restart)[retry_class].get("window_s"), at)
    return {**by_class, retry_class: {"taken": before["taken"] + 1, "at": times}}


def _taken_of(recorded: Mapping[str, Any] | None, window_s: float | None, now: datetime) -> int:
    recorded = recorded or _NONE
    return taken(recorded["taken"], recorded["at"], window_s, now)


def _limits(restart: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: one for name, one in (restart.get("budgets") or {}).items() if one is not None}
