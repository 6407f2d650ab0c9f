"""Runs passes one after another and records what each did: `Run`.

A record is the difference of two graphs, found by comparing them, so that a pass cannot report something else than what
it did. Cost: linear in handles and edges for a pass that changed something, else none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Concatenate, ParamSpec

from penstock.graph.applied import AppliedPass, Edges, Form, Key
from penstock.graph.ssa import Graph, OpHandle, keys_of

P = ParamSpec("P")


class Run:
    """A graph that passes are applied to. `recorded`: `graph.applied` then names each of them, in order."""

    def __init__(self, graph: Graph, *, recorded: bool) -> None:
        self.graph, self._recorded = graph, recorded

    def apply(self, title: str, rewrite: Callable[Concatenate[Graph, P], Graph], *args: P.args, **kw: P.kwargs) -> None:
        """Replace the graph by what the pass `rewrite` makes of it and of what else it is given."""
        before, after = self.graph, rewrite(self.graph, *args, **kw)
        if self._recorded:
            name = getattr(rewrite, "__name__", "")
            made = AppliedPass(name, title) if after is before else difference(before, after, name=name, title=title)
            after = replace(after, applied=(*before.applied, made))
        self.graph = after


def difference(before: Graph, after: Graph, *, name: str, title: str) -> AppliedPass:
    """Return what distinguishes two graphs of one program."""
    old, new = keys_of(before), keys_of(after)
    was, now = (dict(zip(k, g.handles, strict=True)) for k, g in ((old, before), (new, after)))
    edges, edges_now = _edges(before, old), _edges(after, new)
    return AppliedPass(
        name,
        title,
        removed=tuple((k, form_of(was[k])) for k in old if k not in now),
        added=tuple(k for k in new if k not in was),
        changed=tuple((k, form_of(was[k])) for k in new if k in was and _is_other(was[k], now[k])),
        edges_removed=edges - edges_now,
        edges_added=edges_now - edges,
    )


def form_of(handle: OpHandle) -> Form:
    """Return what a handle is besides its name and its operands."""
    from penstock.graph.document import kind_and_role  # of a watched process: it loads pydantic

    kind, role = kind_and_role(handle)
    return Form(handle.op.type, kind, role, handle.op.module, handle.op.source)


def _edges(graph: Graph, keys: list[Key]) -> Edges:
    return frozenset((keys[a], keys[b]) for a, b in graph.edges())


def _is_other(old: OpHandle, new: OpHandle) -> bool:
    return old.op is not new.op and (old.op != new.op or old.kind != new.kind)
