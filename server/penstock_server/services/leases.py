"""Leases of nodes and attached processes. Pure arithmetic on one monotonic clock, kept in memory.

A holder that sent a heartbeat within the TTL is alive; then it is unreachable, and after a further grace it is gone.
After a restart of the server every holder starts with a fresh grace, because the server was the one away. So it was
when it could not look at its leases for longer than `UNWATCHED_S`: it, or its database, had stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

UNWATCHED_S = 10.0


class Standing(Enum):
    """How a lease stands."""

    ALIVE = "alive"
    MISSED = "missed"
    GONE = "gone"


@dataclass(slots=True)
class Leases:
    """When each holder's lease ends."""

    ttl_s: float
    grace_s: float
    _ends: dict[str, float] = field(default_factory=dict)
    _looked_at: float | None = None

    def look(self, now: float, *, uptime: float) -> None:
        """Begin to look at all leases. After a long time without that, every holder has a fresh grace at least.

        `uptime`: seconds of a clock that runs on whatever `now` does, such as the event loop's.
        """
        if self._looked_at is not None and uptime - self._looked_at > UNWATCHED_S:
            fresh = now + self.ttl_s + self.grace_s
            self._ends = {holder: max(end, fresh) for holder, end in self._ends.items()}
        self._looked_at = uptime

    def renew(self, holder: str, now: float) -> None:
        """Extend a lease by the TTL; never shorten it."""
        self._ends[holder] = max(self._ends.get(holder, 0.0), now + self.ttl_s)

    def ensure(self, holder: str, now: float) -> None:
        """Give a holder that is not known a lease of TTL and grace: the server has just started."""
        self._ends.setdefault(holder, now + self.ttl_s + self.grace_s)

    def cut(self, holder: str, now: float) -> None:
        """End a fresh grace: the holder has sent a heartbeat again, so the TTL counts from now."""
        self._ends[holder] = now + self.ttl_s

    def drop(self, holder: str) -> None:
        """Forget a holder that ended."""
        self._ends.pop(holder, None)

    def standing(self, holder: str, now: float) -> Standing:
        """Return how the lease of a holder stands. An unknown holder is alive until `ensure` is called."""
        end = self._ends.get(holder)
        if end is None or now < end:
            return Standing.ALIVE
        return Standing.MISSED if now < end + self.grace_s else Standing.GONE
