"""The clock that the server reads: wall time for rows, monotonic time for leases, steady time for logs.

Lease arithmetic uses this process's monotonic clock only. Wall clocks of two hosts are compared to draw a timeline,
with an error that is shown (`penstock.protocol.clocks`); nothing is decided by that.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What time it is, in three senses."""

    def now(self) -> datetime:
        """Return the wall time, in UTC."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def steady(self) -> datetime:
        """Return a wall time that never goes back: after the clock was set back, it goes on from where it was."""


def unix_ns(at: datetime) -> int:
    """Return a wall time as Unix nanoseconds, to the microsecond."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000


class SystemClock:
    """The clock of this machine."""

    def __init__(self) -> None:
        self._last, self._last_s = self.now(), self.monotonic()  # in this order, so that the sum is never ahead

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def steady(self) -> datetime:
        now, now_s = self.now(), self.monotonic()
        self._last, self._last_s = max(now, self._last + timedelta(seconds=now_s - self._last_s)), now_s
        return self._last
