"""What the exchange with parameter servers cost so far: a row for each pair of peer and block. Cheap, thread-safe.

A trainer counts by endpoint, a server by trainer (`trainer 0`). Taken now and then by who reports it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Row:
    """Sums since the beginning. Bytes are of tensors; `wait_ns`: wall time that the caller spent in calls.

    `staleness`: updates by others that a push did not know of, summed over pushes. `merges`: gradients that were merged
    into others before they were sent (trainer), or into one update (server).
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    wait_ns: int = 0
    retries: int = 0
    staleness: int = 0
    merges: int = 0


class Counters:
    """Rows by (peer, block). `block` is '' for what belongs to none (barriers, beats)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], Row] = {}

    def add(self, peer: str, block: str = "", **amounts: int) -> None:
        """Add to the fields of one row, e.g. `add(endpoint, "w.block0", calls=1, sent_bytes=4096)`."""
        with self._lock:
            row = self._rows.setdefault((peer, block), Row())
            for name, amount in amounts.items():
                setattr(row, name, getattr(row, name) + amount)

    def rows(self) -> dict[tuple[str, str], Row]:
        """Return a copy of all rows."""
        with self._lock:
            return {key: Row(*(getattr(row, f.name) for f in fields(row))) for key, row in self._rows.items()}
