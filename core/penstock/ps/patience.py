"""How often, and how long, a server that does not answer is asked again. Pure: no clock, no sleep."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.03
LARGEST_S = 1.0


class Patience:
    """Waits between attempts: doubled from FIRST_S to LARGEST_S, each cut by up to a half at random.

    At random, so that trainers that lost the same server do not come back all at once.
    """

    def __init__(self, limit_s: float, *, chance: Callable[[], float] = random.random) -> None:
        self.limit_s = limit_s
        self.attempts = 0
        self._chance = chance

    def wait_s(self, away_s: float) -> float | None:
        """Return how long to wait before the next attempt; None: it has been away for as long as it may."""
        left = self.limit_s - away_s
        if left <= 0:
            return None
        full = min(LARGEST_S, FIRST_S * 2.0 ** min(self.attempts, 16))
        self.attempts += 1
        return min(left, full * (1 - 0.5 * self._chance()))
