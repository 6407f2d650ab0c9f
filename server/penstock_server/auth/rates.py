"""Limits of a rate, by who it is: a burst, and so many a second. Pure; the caller gives the time."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_NAMES = 10_000
BURST_S = 10.0
"""Of requests with one token: so many seconds' worth may come at once."""


@dataclass(slots=True)
class Rates:
    """By name: how many came beyond what has been forgiven since, `per_s` a second. Of `MAX_NAMES`, the newest."""

    per_s: float
    burst: float
    _owed: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, name: str, now: float) -> bool:
        """Count one; return whether it was one too many; such a one is not counted, so that retries succeed."""
        owed, at = self._owed.pop(name, (0.0, now))
        owed = max(0.0, owed - (now - at) * self.per_s)
        is_over = owed + 1.0 > self.burst
        self._owed[name] = owed if is_over else owed + 1.0, now
        while len(self._owed) > MAX_NAMES:
            del self._owed[next(iter(self._owed))]
        return is_over


def of_tokens(per_s: float) -> Rates:
    """Return the limit of requests with one token."""
    return Rates(per_s, max(1.0, per_s * BURST_S))
