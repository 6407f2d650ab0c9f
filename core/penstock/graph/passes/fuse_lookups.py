"""Lookups that are concatenated become one operator, which writes each row where it belongs: `penstock.lookup_concat`.

A lookup joins if the concatenation is the only reader of its rows. What else is concatenated is copied. Ids are read
as they were fed, through views that only change their shape. The lookups move to the place of the concatenation, and
never past a handle that writes their table or their ids. The same bits: rows are copied. What is in `kept` (what is
fetched) is still made. An id outside its table is an error of the recorded lookup, which the handle keeps in `parts`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.graph.analysis.liveness import Readers, drop_unread
from penstock.graph.analysis.origins import FLATTENED, Origins, Source
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Operator, Ref
from penstock.program.program import Program

LOOKUP = "penstock.lookup_table.default"
FUSED = "penstock.lookup_concat.default"


@dataclass(frozen=True, slots=True)
class _Join:
    """A concatenation, the lookups that join it, and their places among its operands."""

    handle: OpHandle
    lookups: tuple[OpHandle, ...]
    ids: tuple[str, ...]
    parts: tuple[str, ...]
    order: tuple[int, ...]


def fuse_lookups(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, with lookups and their concatenations fused. Linear in the handles."""
    if not any(h.op.type == LOOKUP for h in graph.handles):
        return graph
    readers, origins = Readers(graph, kept), Origins(graph, program)
    makers = {n: h for h in graph.handles if h.op.type == LOOKUP for n in h.makes()}
    joins = {h.index: j for h in graph.handles if (j := _join(graph, h, makers, readers, origins)) is not None}
    if not joins:
        return graph
    gone = {h.index for j in joins.values() for h in j.lookups}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        join = joins.get(handle.index)
        if join is not None:
            stands_for = [handle, *join.lookups]
            parts = tuple(h.op for h in join.lookups)
            rewriter.put(handle.kind, _operator(join), handle.replica, handle.rows_of, stands_for, parts=parts)
        elif handle.index not in gone:
            rewriter.keep(handle)
    return drop_unread(rewriter.finish(), kept, FLATTENED)


def _join(
    graph: Graph, handle: OpHandle, makers: dict[str, OpHandle], readers: Readers, origins: Origins
) -> _Join | None:
    if not _is_beside(handle.op, origins):
        return None
    names = handle.reads()
    found: dict[str, tuple[OpHandle, Source]] = {}
    for name in dict.fromkeys(names):
        maker = makers.get(name)
        if maker is not None and readers.only_one(name) is handle and maker.replica == handle.replica:
            ids = ids_of(maker, handle, origins)
            if ids is not None:
                found[name] = maker, ids
    shapes = [origins.shape(n) for n in names]
    if len(found) < 2 or any(shape is None or len(shape) != 2 for shape in shapes) or not origins.one_dtype(names):
        return None
    parts = tuple(dict.fromkeys(n for n in names if n not in found))
    position = {n: k for k, n in enumerate(found)} | {n: -1 - k for k, n in enumerate(parts)}
    lookups, sources = zip(*found.values(), strict=True)
    return _Join(handle, lookups, tuple(s.name for s in sources), parts, tuple(position[n] for n in names))


def _is_beside(op: Operator, origins: Origins) -> bool:
    """Whether an operator concatenates matrices side by side."""
    if op.type != "aten.cat.default" or op.kwargs or len(op.args) != 2 or op.args[1] not in (1, -1):
        return False
    return isinstance(op.args[0], tuple) and all(isinstance(v, Ref) for v in op.args[0])


def ids_of(lookup: OpHandle, at: OpHandle, origins: Origins) -> Source | None:
    """Return where a lookup's ids come from; None if it cannot move to the handle `at`."""
    table, ids, *_ = lookup.op.args
    if lookup.op.kwargs or not isinstance(table, Ref) or not isinstance(ids, Ref):
        return None
    whole = origins.flattened(ids.name)
    source = whole[0] if len(whole) == 1 else Source(ids.name)
    moved = (replace(source, through=(*source.through, lookup.index)), Source(table.name, 0, (lookup.index,)))
    return None if any(origins.is_overwritten(s, at) for s in moved) else source


def _operator(join: _Join) -> Operator:
    tables = tuple(h.op.args[0] for h in join.lookups)
    padding = tuple(h.op.args[2] if len(h.op.args) > 2 else -1 for h in join.lookups)
    ids, parts = (tuple(Ref(n) for n in names) for names in (join.ids, join.parts))
    return replace(join.handle.op, type=FUSED, args=(tables, ids, padding, parts, join.order))
