"""Who reads what in a graph: what passes ask before they take a variable away."""

from __future__ import annotations

from collections.abc import Collection, Container

from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle


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
        variable = self._graph.variables[name]
        readers = self.of(name)
        lasting = variable.persistable or variable.feed or self.is_fetched(name)
        if lasting or variable.storage != name or len(readers) != 1 or len(self._touched[name]) != 2:
            return None
        return readers[0]


def drop_unread_views(graph: Graph, kept: Collection[str], types: Container[str]) -> Graph:
    """Return the graph without the handles of these view operators whose results are not read."""
    readers = Readers(graph, kept)
    dead = {
        h.index
        for h in graph.handles
        if h.op.type in types and not any(readers.of(n) or readers.is_fetched(n) for n in h.makes())
    }
    if not dead:
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index not in dead:
            rewriter.keep(handle)
    return rewriter.finish()
