"""Lookups that are summed over sequences become one operator, which reads the rows once: `penstock.lookup_pool`.

A lookup joins if the sum is the only reader of its rows. Ids are read as they were fed, through views that only change
their shape. The lookup moves to the place of the sum, and never past a handle that writes its table or its ids. The
same bits: sums are in the order of the rows. What is in `kept` (what is fetched) is still made. An id outside its table
is an error of the recorded lookup, which the handle keeps in `parts`. The gradient is that of `fuse_sparse.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.graph.analysis.liveness import Readers, drop_unread
from penstock.graph.analysis.origins import FLATTENED, Origins
from penstock.graph.passes.fuse_lookups import LOOKUP, ids_of
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Operator, Ref
from penstock.program.program import Program

POOL = "penstock.sequence_pool.default"
BAG = "penstock.lookup_pool.default"


def fuse_bags(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, with lookups and their sums fused. Linear in the handles."""
    makers = {n: h for h in graph.handles if h.op.type == LOOKUP for n in h.makes()}
    if not makers:
        return graph
    readers, origins = Readers(graph, kept), Origins(graph, program)
    bags = {h.index: b for h in graph.handles if (b := _bag(h, makers, readers, origins)) is not None}
    if not bags:
        return graph
    gone = {lookup.index for lookup, _ in bags.values()}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index in bags:
            lookup, op = bags[handle.index]
            rewriter.put(handle.kind, op, handle.replica, handle.rows_of, [handle, lookup], parts=(lookup.op,))
        elif handle.index not in gone:
            rewriter.keep(handle)
    return drop_unread(rewriter.finish(), kept, FLATTENED)


def _bag(
    handle: OpHandle, makers: dict[str, OpHandle], readers: Readers, origins: Origins
) -> tuple[OpHandle, Operator] | None:
    """The lookup that a sum over sequences reads alone, and the operator of both; None if there is none."""
    op = handle.op
    if op.type != POOL or op.kwargs or op.args[2] != "sum" or not isinstance(op.args[0], Ref):
        return None
    rows = op.args[0].name
    lookup, shape = makers.get(rows), origins.shape(rows)
    if lookup is None or readers.only_one(rows) is not handle or lookup.replica != handle.replica:
        return None
    ids = ids_of(lookup, handle, origins)
    if ids is None or shape is None or len(shape) != 2:
        return None
    padding = lookup.op.args[2] if len(lookup.op.args) > 2 else -1
    args = (lookup.op.args[0], Ref(ids.name), op.args[1], padding, op.args[3])
    return lookup, replace(op, type=BAG, args=args)
