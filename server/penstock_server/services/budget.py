"""The budget of restarts: all that a job ever took, or those of a sliding window alone. Pure.

With `restart.window_s` a restart that is older than the window counts no more, so a job that runs for weeks is not
ended by the fourth fault of a machine in a month, and one that fails again and again still is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta


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
