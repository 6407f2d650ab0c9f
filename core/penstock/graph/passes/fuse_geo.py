"""A step's exchange in GEO mode: one operator for all parameters, which reads ids as they were fed.

An operator for each parameter is a call of Python each, and keeps copies of all ids alive for one of them, which no
other operator needs once updates read their gradients where they arise (`fuse_sparse.py`). Most steps only count, so
what is fused costs next to nothing.

The operators move to the last one of their remote, and never past a handle that touches their parameter; nor is an id
read that a handle between its copy and the operator has overwritten. What would change meaning stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from penstock.graph.analysis.origins import Origins
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.program import Program
from penstock.ps.remote import GEO, GEO_STEP


@dataclass(frozen=True, slots=True)
class _Member:
    """An operator that is fused, and what it reads of ids."""

    handle: OpHandle
    ids: tuple[str, ...]


def fuse_geo(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, with one such operator a remote. `kept`: what is fetched is still made.

    Cost: linear in the handles, for each parameter.
    """
    remotes: dict[str, list[OpHandle]] = {}
    for handle in graph.handles:
        if handle.op.type == GEO:
            remotes.setdefault(str(handle.op.args[2]), []).append(handle)
    if not remotes:
        return graph
    origins, read = Origins(graph, program), {n for h in graph.handles for n in h.reads()} | set(kept)
    groups = [_members(graph, origins, handles, read) for handles in remotes.values()]
    ends = {g[-1].handle.index: g for g in groups if g}
    fused = {m.handle.index for g in groups for m in g}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index in ends:
            members = ends[handle.index]
            handles = [m.handle for m in members]
            rewriter.put(handle.kind, _operator(members), handle.replica, handle.rows_of, handles)
        elif handle.index not in fused:
            rewriter.keep(handle)
    return rewriter.finish()


def _members(graph: Graph, origins: Origins, handles: Sequence[OpHandle], read: Collection[str]) -> list[_Member]:
    end = handles[-1]
    found = []
    for handle in handles:
        between = graph.handles[handle.index + 1 : end.index + 1]
        if not _is_touched(graph, handle, between) and not any(n in read for n in handle.makes()):
            ids = _ids(origins, handle, end)
            found += [] if ids is None else [_Member(handle, ids)]
    return found


def _is_touched(graph: Graph, handle: OpHandle, others: Sequence[OpHandle]) -> bool:
    written = {graph.variables[n].storage for n in handle.op.writes}
    return any(graph.variables[n].storage in written for h in others for n in (*h.reads(), *h.op.writes, *h.makes()))


def _ids(origins: Origins, handle: OpHandle, end: OpHandle) -> tuple[str, ...] | None:
    """Return the tensors that have the ids, in their order; None if one is overwritten before `end`."""
    rows = handle.op.args[1]
    if not isinstance(rows, Ref):
        return ()
    sources = [replace(s, through=(*s.through, handle.index)) for s in origins.flattened(rows.name)]
    return None if any(origins.is_overwritten(s, end) for s in sources) else tuple(s.name for s in sources)


def _operator(members: Sequence[_Member]) -> Operator:
    ops = [m.handle.op for m in members]
    args: tuple[Arg, ...] = (
        tuple(op.args[0] for op in ops),
        tuple(Ref(n) for m in members for n in m.ids),
        ops[-1].args[2],
        tuple(op.args[3] for op in ops),
        tuple(len(m.ids) for m in members),
        json.dumps([op.args[4:7] for op in ops]),
    )
    writes = tuple(w for op in ops for w in op.writes)
    pairs = tuple(dict.fromkeys(pair for op in ops for pair in op.role_vars))
    return replace(ops[-1], type=GEO_STEP, args=args, writes=writes, role_vars=pairs)
