"""Rewrite a graph handle by handle: what every pass is made of.

A pass walks the old handles in order and gives a replacement for each. Edges are never carried over: the new
graph derives them again from its storages, by the rules of `ssa.py`, so that a pass can get the operators wrong but not
the order. Exchange plans and control edges follow the handles that they name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import Bug
from penstock.graph.ssa import Graph, GraphBuilder, OpHandle, Physical, reduce_edges
from penstock.program.ir import Operator

if TYPE_CHECKING:
    from penstock.protocol.graphdoc import OpKind


class Rewriter:
    """Builds the successor of `graph`. The order of the calls is the new sequential order, and must be a valid one."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._builder = GraphBuilder()
        self._builder.variables = dict(graph.variables)
        self._now: dict[int, tuple[int, ...]] = {}  # old handle -> the new ones that stand for it

    def declare(self, variable: Physical) -> str:
        """Add a physical variable that the old graph does not have; return its key."""
        return self._builder.declare(variable)

    def keep(self, handle: OpHandle, op: Operator | None = None, control: Iterable[int] = ()) -> OpHandle:
        """Take a handle over, with another operator if `op` is given. `control`: new handles that it waits for."""
        op = op or handle.op
        return self.put(handle.kind, op, handle.replica, handle.rows_of, [handle], control, parts=handle.parts)

    def put(
        self,
        kind: OpKind,
        op: Operator,
        replica: int,
        rows_of: int,
        stands_for: Sequence[OpHandle] = (),
        control: Iterable[int] = (),
        *,
        parts: tuple[Operator, ...] = (),
    ) -> OpHandle:
        """Append a new handle in the place of the old ones `stands_for`; several may stand for one.

        `parts`: the recorded operators by which its errors are explained.
        """
        carried = (n for old in stands_for for c in old.control for n in self._now.get(c, ()))
        handle = self._builder.add(kind, op, replica, rows_of, frozenset({*control, *carried}))
        handle.parts = parts
        for old in stands_for:
            self._now[old.index] = (*self._now.get(old.index, ()), handle.index)
        return handle

    def finish(self) -> Graph:
        """Return the new graph. Raises Bug if an exchange has lost its handles."""
        reduce_edges(self._builder.handles)
        used = {n for h in self._builder.handles for n in (*h.reads(), *h.makes(), *h.op.writes)}
        roots = {self._builder.variables[n].storage for n in used}
        variables = {
            k: v for k, v in self._builder.variables.items() if k in used or k in roots or k in self._graph.variables
        }
        syncs = []
        for sync in self._graph.syncs:
            indices = tuple(dict.fromkeys(n for i in sync.handles for n in self._now.get(i, ())))
            if not indices:
                raise Bug(f"a pass has dropped the exchange of {sync.gradient!r}")
            syncs.append(replace(sync, handles=indices))
        return replace(self._graph, handles=self._builder.handles, variables=variables, syncs=syncs)
