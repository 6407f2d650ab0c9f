"""How many wrong secrets a peer may send: a burst, then one a second. Pure; the caller gives the time.

A right one always passes: it cannot be guessed, and a machine that many people share must not lock them all out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BURST = 20
PER_S = 1.0
MAX_PEERS = 10_000


@dataclass(slots=True)
class WrongSecrets:
    """Wrong secrets by peer: how many were sent beyond what has been forgiven since."""

    _owed: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, peer: str, now: float) -> bool:
        """Count one; return whether it was one too many."""
        owed, at = self._owed.pop(peer, (0.0, now))
        owed = max(0.0, owed - (now - at) * PER_S) + 1.0
        self._owed[peer] = min(owed, BURST + 1.0), now
        while len(self._owed) > MAX_PEERS:
            del self._owed[next(iter(self._owed))]
        return owed > BURST
