"""Lifetimes of memory: which allocation lives from when to when, and which temporaries outlive a run.

An *allocation* is one request for memory of one handle, seen in a first run. It *lives* in every handle that touches
a variable which keeps it, views of that variable included, and in its maker, by the edges of a graph alone: of two
handles that no path orders either may run first. The engine releases every slot that is not kept with its last reader;
`staying` names those that it keeps. Source: eager_deletion_pass.cc, FLAGS_eager_delete_tensor_gb (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence, Set
from dataclasses import dataclass

from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle


@dataclass(frozen=True, slots=True)
class Allocation:
    """`occurrence`: among the handle's allocations of `nbytes`. `results`: variables that keep it; none: scratch.

    `twins`: (position, variable) of operands that are laid out as its only result is.
    `alone`: the handle allocates nothing else.
    """

    handle: int
    nbytes: int
    occurrence: int
    results: tuple[str, ...] = ()
    twins: tuple[tuple[int, str], ...] = ()
    alone: bool = False


class Liveness:
    """`lasting`: storages that live on after the last handle. O(handles x edges / 64) bits."""

    def __init__(self, graph: Graph, allocations: Sequence[Allocation], lasting: Set[str] = frozenset()) -> None:
        variables = graph.variables
        touching: dict[str, set[int]] = {}
        for handle in graph.handles:
            for name in (*handle.reads(), *handle.makes(), *handle.op.writes):
                touching.setdefault(variables[name].storage, set()).add(handle.index)
        self.storages = [frozenset(variables[n].storage for n in a.results) for a in allocations]
        self.users = [
            {a.handle}.union(*(touching[s] for s in held)) for a, held in zip(allocations, self.storages, strict=True)
        ]
        self.lasts = [not held.isdisjoint(lasting) for held in self.storages]
        self.ancestors = ancestors_of(graph)

    def dies_at(self, allocation: int, handle: int) -> bool:
        """Whether `handle` uses the memory and every other user runs before."""
        users = self.users[allocation]
        before = self.ancestors[handle] | 1 << handle
        return not self.lasts[allocation] and handle in users and all(before >> user & 1 for user in users)

    def is_over_before(self, allocation: int, handle: int) -> bool:
        """Whether every user of the memory runs before `handle`."""
        before = self.ancestors[handle]
        return not self.lasts[allocation] and all(before >> user & 1 for user in self.users[allocation])


def ancestors_of(graph: Graph) -> list[int]:
    """Return, for each handle, the bit set of those that run before it."""
    ancestors: list[int] = []
    for handle in graph.handles:
        reach = 0
        for before in handle.before:
            reach |= ancestors[before] | 1 << before
        ancestors.append(reach)
    return ancestors


def staying(graph: Graph, *, eager: bool, kept: Set[str] = frozenset()) -> frozenset[str]:
    """Return the physical variables that hold their memory until temporaries are cleared.

    `eager`: release with the last use; only those called `kept` (names in the Program) stay. Otherwise all do.
    """
    made = {n for handle in graph.handles for n in handle.makes()}
    stay = set()
    for key in made:
        variable = graph.variables[key]
        root = graph.variables[variable.storage]
        lasts = variable.persistable or variable.feed or root.persistable or root.feed
        if not lasts and (not eager or variable.name in kept or root.name in kept):
            stay.add(key)
    return frozenset(stay)


class Readers:
    """The readers of each variable and storage of `graph`. `kept`: names that the caller fetches."""

    def __init__(self, graph: Graph, kept: Collection[str]) -> None:
        self._graph, self._kept = graph, frozenset(kept)
        self._readers: dict[str, list[OpHandle]] = {}
        self._touched: dict[str, set[int]] = {}
        for handle in graph.handles:
            for name in dict.fromkeys(handle.reads()):
                self._readers.setdefault(name, []).append(handle)
            for name in (*handle.reads(), *handle.op.writes, *handle.makes()):
                self._touched.setdefault(graph.variables[name].storage, set()).add(handle.index)

    def of(self, name: str) -> list[OpHandle]:
        """Return the handles that read a variable."""
        return self._readers.get(name, [])

    def is_fetched(self, name: str) -> bool:
        """Whether the caller wants this variable."""
        return self._graph.variables[name].name in self._kept

    def only_one(self, name: str) -> OpHandle | None:
        """Return the one reader of a temporary whose memory nothing else touches, by no view either."""
        readers = self.all_of(name)
        return readers[0] if readers is not None and len(readers) == 1 else None

    def all_of(self, name: str) -> list[OpHandle] | None:
        """Return the readers of a temporary whose memory nothing else touches; None if something may."""
        variable = self._graph.variables[name]
        readers = self.of(name)
        lasting = variable.persistable or variable.feed or self.is_fetched(name)
        if lasting or variable.storage != name or len(self._touched[name]) != len(readers) + 1:
            return None
        return readers


def drop_unread(graph: Graph, kept: Collection[str], types: Container[str]) -> Graph:
    """Return the graph without the handles of these operators, which write nothing, whose results are not read.

    Nor those whose readers are all such handles. `kept`: names that the caller fetches.
    """
    fetched = frozenset(kept)
    wanted = {name for name, variable in graph.variables.items() if variable.name in fetched}
    dead = set()
    for handle in reversed(graph.handles):
        if handle.op.type in types and wanted.isdisjoint(handle.makes()):
            dead.add(handle.index)
        else:
            wanted.update(handle.reads())
            wanted.update(handle.op.writes)
    if not dead:
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index not in dead:
            rewriter.keep(handle)
    return rewriter.finish()
