"""Which updates may move to one place: groups whose members meet nothing that reads or writes what they touch.

An update moves later only, to the last one of its group, and never past a handle that reads what it writes or writes
what it reads. So a pass may put one operator for all of a group in the place of the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

from penstock.graph.ssa import Graph, OpHandle


class Movable(Protocol):
    """An update: what it has in common with those that it may join, and the storages that it touches."""

    @property
    def key(self) -> Hashable: ...
    @property
    def reads(self) -> frozenset[str]: ...
    @property
    def writes(self) -> frozenset[str]: ...


M = TypeVar("M", bound=Movable)


def grouped(graph: Graph, ends: Mapping[int, M]) -> list[list[M]]:
    """Return the updates in groups, in order. `ends`: index of an update's last handle -> the update."""
    found: list[list[M]] = []
    opened: dict[Hashable, list[M]] = {}
    for handle in graph.handles if ends else ():
        update = ends.get(handle.index)
        reads, writes = (update.reads, update.writes) if update is not None else touched(graph, [handle])
        opened = {key: group for key, group in opened.items() if not any(collides(u, reads, writes) for u in group)}
        if update is None:
            continue
        if update.key not in opened:
            found.append(opened.setdefault(update.key, []))
        opened[update.key].append(update)
    return found


def collides(update: Movable, reads: frozenset[str], writes: frozenset[str]) -> bool:
    """Whether something that reads and writes these storages may not change places with an update."""
    return not (
        update.writes.isdisjoint(reads) and update.writes.isdisjoint(writes) and update.reads.isdisjoint(writes)
    )


def touched(graph: Graph, handles: Sequence[OpHandle]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the storages that handles read, and those that they write."""
    reads = {graph.variables[n].storage for h in handles for n in h.reads()}
    writes = {graph.variables[n].storage for h in handles for n in (*h.op.writes, *h.makes())}
    return frozenset(reads), frozenset(writes)
