"""How many wrong secrets a peer may send: a burst, then one a second. Pure; the caller gives the time.

A right one is not counted here: it cannot be guessed, and a machine that many people share must not lock them all out.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.auth.rates import Rates

BURST = 20
PER_S = 1.0


@dataclass(slots=True)
class WrongSecrets(Rates):
    """Wrong secrets by peer."""

    per_s: float = PER_S
    burst: float = BURST
