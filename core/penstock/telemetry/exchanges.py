"""What a process has exchanged with parameter servers, as EXCHANGE frames. No thread, no clock.

Clients and servers count in objects of their own (`penstock.ps.counters.Counters`); here they are read, by the drain
thread, and a frame is made when `PERIOD_S` has passed since the last and a sum has changed. Several sources of one
process are one frame: rows of the same peer and block are added up. Of a source that has ended the sums stay, which
count from the start of the process, and nothing that it held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.protocol.exchange import Sums, body_of, lanes_body, process_body
from penstock.protocol.frames import Frame, Kind
from penstock.protocol.tables import TableSums, tables_body
from penstock.telemetry.outbox import Parcel, parcel

PERIOD_S = 0.5


class ExchangeSource(Protocol):
    """Counters by (peer, block), which may be read from any thread."""

    def rows(self) -> Mapping[tuple[str, str], Sums]:
        """Return a copy of all rows."""
        ...


_NO_LANES: Mapping[int, str] = {}

TableSource = Callable[[], Sequence[TableSums]]
"""Returns what each table of a server holds; may be called from any thread."""


@dataclass(frozen=True, slots=True)
class _Party:
    """A client or server that runs."""

    source: ExchangeSource
    tables: TableSource | None


class ExchangeWatch:
    """The sources of one process, and what was sent of them last. `add` and `remove`: from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parties: list[_Party] = []
        self._ended: dict[tuple[str, str], Sums] = {}
        self._ended_tables: dict[str, TableSums] = {}
        self._endpoints: dict[str, None] = {}
        self._mode = ""
        self._waited_s = 0.0
        self._sent: dict[tuple[str, str], Sums] = {}

    def add(
        self, source: ExchangeSource, endpoints: Sequence[str], tables: TableSource | None = None, mode: str = ""
    ) -> None:
        """Watch a source and the tables beside it, once. `mode`: of a server."""
        with self._lock:
            self._mode = mode or self._mode
            self._endpoints.update(dict.fromkeys(endpoints))
            if not any(source is known.source for known in self._parties):
                self._parties.append(_Party(source, tables))

    def remove(self, source: ExchangeSource) -> None:
        """Read a source that has ended a last time, and let it go. Its tables count until others have their names.

        Does nothing for one that is not watched. Raises what the source raises; it is let go all the same.
        """
        with self._lock:
            ended = [known for known in self._parties if known.source is source]
            self._parties = [known for known in self._parties if known.source is not source]
            for party in ended:
                self._ended = _sum([self._ended, party.source.rows()])
                self._ended_tables |= _tables_of([party])

    def due(
        self, interval_s: float, *, step: int, now_ns: int, cpu_ns: int, lanes: Mapping[int, str] = _NO_LANES
    ) -> Parcel | None:
        """Return the frame that is due `interval_s` after the last call, if any. Raises what a source raises.

        `cpu_ns`: processor time of the process. `lanes`: of its work as a server, the block of each.
        """
        self._waited_s += interval_s
        if self._waited_s < PERIOD_S:
            return None
        with self._lock:
            parties, endpoints = list(self._parties), list(self._endpoints)
            ended, tables, mode = self._ended, dict(self._ended_tables), self._mode
        rows = _sum([ended, *(party.source.rows() for party in parties)])
        if rows == self._sent:
            return None
        self._sent, self._waited_s = rows, 0.0
        tables |= _tables_of(parties)
        body = body_of(rows, endpoints) | process_body(mode, cpu_ns) | tables_body(list(tables.values()))
        body |= lanes_body(lanes)
        return parcel(Frame(Kind.EXCHANGE, 0, 0, 0, now_ns, step, body=body))


def _sum(each: Iterable[Mapping[tuple[str, str], Sums]]) -> dict[tuple[str, str], Sums]:
    total: dict[tuple[str, str], Sums] = {}
    for rows in each:
        for key, row in rows.items():
            if key in total:
                total[key].add(row)
            else:
                total[key] = replace(row)
    return total


def _tables_of(parties: Iterable[_Party]) -> dict[str, TableSums]:
    """By name; of several of one name in a process the last one's."""
    return {one.name: one for party in parties if party.tables is not None for one in party.tables()}
