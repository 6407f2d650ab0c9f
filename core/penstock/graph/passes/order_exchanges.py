"""Exchanges with other processes happen in one order on every rank: that in which the graph lists them.

Without it two ranks could each wait in the exchange that the other makes later. The list is a function of the Program
and its settings, so it is equal on all ranks; control edges make each rank follow it. With several rings
(nccl_comm_num) exchanges take turns on them, and each ring has an order of its own.
Source: all_reduce_deps_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph.across import GATHERS, SUMS
from penstock.graph.passes.rewrite import Rewriter
from penstock.graph.ssa import Graph


def order_exchanges(graph: Graph, rings: tuple[str, ...] = ()) -> Graph:
    """Return the graph with its exchanges in order, spread over `rings` (none: those that they name)."""
    if not any(handle.op.type in SUMS | GATHERS for handle in graph.handles):
        return graph
    rewriter = Rewriter(graph)
    last: dict[str, int] = {}
    count = 0
    for handle in graph.handles:
        if handle.op.type not in SUMS | GATHERS:
            rewriter.keep(handle)
            continue
        ring = rings[count % len(rings)] if rings else str(handle.op.args[-1])
        count += 1
        op = replace(handle.op, args=(*handle.op.args[:-1], ring))
        last[ring] = rewriter.keep(handle, op, control=[last[ring]] if ring in last else []).index
    return rewriter.finish()
