"""How much slower this machine is right now than the reference machine at rest.

Processor time is no constant: another thread of the same core, a full cache, and time that a host takes from a virtual
machine all stretch it. A bound on it is multiplied by what the same loop takes beside it.
"""

from __future__ import annotations

import time

_REFERENCE_S = 0.0145
"""`_loop` on the reference machine (Xeon, 2 cores, Python 3.11) at rest: 13.8 to 14.5 ms of processor time."""


def _loop() -> int:
    found: dict[int, int] = {}
    for i in range(150_000):
        found[i & 1023] = found.get(i & 1023, 0) + i
    return len(found)


def slowdown() -> float:
    """Return how many times longer the yardstick takes now than at rest; at least 1."""
    begin = time.thread_time()
    _loop()
    return max(1.0, (time.thread_time() - begin) / _REFERENCE_S)
