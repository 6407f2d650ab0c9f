"""What a process has exchanged with parameter servers, as EXCHANGE frames. No thread, no clock.

Clients and servers count in objects of their own (`penstock.ps.counters.Counters`); here they are read, by the drain
thread, and a frame is made when `PERIOD_S` has passed since the last and a sum has changed. Several sources of one
process are one frame: rows of the same peer and block are added up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.protocol.exchange import Sums, body_of
from penstock.protocol.frames import Frame, Kind
from penstock.protocol.tables import TableSums, tables_body
from penstock.telemetry.outbox import Parcel, parcel

PERIOD_S = 0.5


class ExchangeSource(Protocol):
    """Counters by (peer, block), which may be read from any thread."""

    def rows(self) -> Mapping[tuple[str, str], Sums]:
        """Return a copy of all rows."""
        ...


TableSource = Callable[[], Sequence[TableSums]]
"""Returns what each table of a server holds; may be called from any thread."""


class ExchangeWatch:
    """The sources of one process, and what was sent of them last. `add` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[ExchangeSource] = []
        self._tables: list[TableSource] = []
        self._endpoints: dict[str, None] = {}
        self._waited_s = 0.0
        self._sent: dict[tuple[str, str], Sums] = {}

    def add(self, source: ExchangeSource, endpoints: Sequence[str], tables: TableSource | None = None) -> None:
        """Watch a source and the tables beside it, once."""
        with self._lock:
            self._endpoints.update(dict.fromkeys(endpoints))
            if not any(source is known for known in self._sources):
                self._sources.append(source)
                self._tables += [] if tables is None else [tables]

    def due(self, interval_s: float, *, step: int, now_ns: int) -> Parcel | None:
        """Return the frame that is due `interval_s` after the last call, if any. Raises what a source raises."""
        self._waited_s += interval_s
        if self._waited_s < PERIOD_S or not self._sources:
            return None
        with self._lock:
            sources, endpoints, tables = list(self._sources), list(self._endpoints), list(self._tables)
        rows = _sum(sources)
        if rows == self._sent:
            return None
        self._sent, self._waited_s = rows, 0.0
        body = body_of(rows, endpoints) | tables_body([one for table in tables for one in table()])
        return parcel(Frame(Kind.EXCHANGE, 0, 0, 0, now_ns, step, body=body))


def _sum(sources: Sequence[ExchangeSource]) -> dict[tuple[str, str], Sums]:
    rows: dict[tuple[str, str], Sums] = {}
    for source in sources:
        for key, row in source.rows().items():
            rows.setdefault(key, Sums()).add(row)
    return rows
