"""Exponential back-off with jitter between attempts to reach a peer. No clock, no sleep: the caller waits as it can.

Not a library's decorator: these waits end early when their owner closes, and start again after a success.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

_chance = random.SystemRandom().random
"""Not the process's generator: scripts seed that one, and a thread that tries anew must not shift what they draw."""


class Backoff:
    """Waits doubled from `first_s` to `longest_s`, each cut by up to a half at random, so that peers spread out.

    `limit_s`: from the first failure on, for `wait_within_s`.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        limit_s: float = math.inf,
        chance: Callable[[], float] = _chance,
    ) -> None:
        self._first_s, self._longest_s, self._limit_s, self._chance = first_s, longest_s, limit_s, chance
        self.attempts = 0

    def wait_s(self) -> float:
        """Return how long to wait before the next attempt."""
        full = min(self._longest_s, self._first_s * 2.0 ** min(self.attempts, 16))
        self.attempts += 1
        return full * (1 - 0.5 * self._chance())

    def wait_within_s(self, unreachable_s: float) -> float | None:
        """Return how long to wait after `unreachable_s` without success; None: the limit has passed."""
        left = self._limit_s - unreachable_s
        return min(left, self.wait_s()) if left > 0 else None

    def reset(self) -> None:
        """Begin anew: an attempt has succeeded."""
        self.attempts = 0
