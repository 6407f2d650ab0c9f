"""What the exchange with parameter servers cost so far: sums for each pair of peer and block. Cheap, thread-safe.

A trainer counts by endpoint, a server by trainer (`trainer 0`). Taken now and then by who reports it.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from penstock.protocol.exchange import Sums


class Counters:
    """Sums by (peer, block). `block` is '' for what belongs to none (barriers, beats)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], Sums] = {}

    def add(self, peer: str, block: str = "", **amounts: int) -> None:
        """Add to the fields of one row, e.g. `add(endpoint, "w.block0", calls=1, sent_bytes=4096)`."""
        with self._lock:
            row = self._rows.get((peer, block))
            if row is None:
                row = self._rows[peer, block] = Sums()
            for name, amount in amounts.items():  # cheaper than to make sums of them first
                setattr(row, name, getattr(row, name) + amount)

    def rows(self) -> dict[tuple[str, str], Sums]:
        """Return a copy of all rows."""
        with self._lock:
            return {key: replace(row) for key, row in self._rows.items()}
