"""UUIDv7 (RFC 9562): identifiers that sort by the time they were made.

Within one process they are strictly increasing: the 12 bits after the milliseconds count up, and
borrow from the next millisecond when more than 4096 are asked for in one. A process that goes on after another calls
`go_on_after` with the last identifier of that one, so that the order holds when the clock was set back in between.
Pages and event histories order by identifier alone because of this.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid

_lock = threading.Lock()
_last = 0


def go_on_after(identifier: str) -> None:
    """Have identifiers from now on be larger than one that was made before, whatever the clock says."""
    global _last
    high = uuid.UUID(identifier).int >> 64
    with _lock:
        _last = max(_last, (high >> 16) << 12 | high & 0xFFF)


def uuid7() -> str:
    """Return a new UUIDv7 as lower-case text."""
    global _last
    with _lock:
        _last = max(_last + 1, (time.time_ns() // 1_000_000) << 12)
        ticks = _last
    high = (ticks >> 12) << 16 | 0x7000 | (ticks & 0xFFF)
    low = (0b10 << 62) | secrets.randbits(62)
    return str(uuid.UUID(int=high << 64 | low))
