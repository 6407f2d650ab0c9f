"""The clock that the server reads: wall time for rows, monotonic time for leases, steady time for deadlines in rows.

Lease arithmetic uses this process's monotonic clock only; no wall clock of two hosts is ever compared.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What time it is, in two senses."""

    def now(self) -> datetime:
        """Return the wall time, in UTC."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def steady(self) -> datetime:
        """Return the wall time of the server's start plus what has passed since, whatever the clock was set to."""


class SystemClock:
    """The clock of this machine."""

    def __init__(self) -> None:
        self._began, self._began_s = self.now(), self.monotonic()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def steady(self) -> datetime:
        return self._began + timedelta(seconds=self.monotonic() - self._began_s)
