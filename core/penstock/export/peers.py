"""What a process exchanged with each peer between two of its reports, whose sums count from its start. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.protocol.exchange import FIELDS, Sums, rows_of
from penstock.protocol.frames import Frame

UNSENT = "(waits and merges before sending)"
"""Peer of what is counted for no peer."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What was exchanged with a peer from `start_ns` to `end_ns`."""

    peer: str
    start_ns: int
    end_ns: int
    sums: Sums


def intervals(frames: Sequence[Frame], started_ns: int | None) -> Iterator[Interval]:
    """Yield what the last of one or two EXCHANGE frames adds to the one before, or to the start of the process.

    A peer with which nothing was exchanged is left out. Raises PeerError for a body that is none.
    """
    last = frames[-1]
    begins_ns = frames[0].t0_ns if len(frames) > 1 else started_ns
    start_ns = last.t0_ns if begins_ns is None else min(begins_ns, last.t0_ns)
    before = _sums(frames[0]) if len(frames) > 1 else {}
    for peer, sums in _sums(last).items():
        old = before.get(peer, Sums())
        new = Sums(*(max(0, getattr(sums, name) - getattr(old, name)) for name in FIELDS))
        if any(new.values()):
            yield Interval(peer or UNSENT, max(start_ns, 0), max(last.t0_ns, 0), new)


def _sums(frame: Frame) -> dict[str, Sums]:
    found: dict[str, Sums] = {}
    for row in rows_of(frame.body)[1]:
        found.setdefault(row.peer, Sums()).add(row.sums)
    return found
