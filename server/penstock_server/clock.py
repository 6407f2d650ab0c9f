"""The clock that the server reads: wall time for rows, monotonic time for leases.

Lease arithmetic uses this process's monotonic clock only; no wall clock of two hosts is ever compared.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What time it is, in two senses."""

    def now(self) -> datetime:
        """Return the wall time, in UTC."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
