"""Passes that add edges alone: one order of exchanges on every rank, and sequential order on each replica.

`order_exchanges`: exchanges with other processes happen in the order in which the graph lists them. Without it two
ranks could each wait in the exchange that the other makes later. The list is a function of the Program and its
settings, so it is equal on all ranks. With several rings (nccl_comm_num) exchanges take turns on them, and each ring
has an order of its own. `run_in_program_order`: on each replica one operator runs after another. Exchanges between
replicas take part in the chain of every replica whose tensors they read or write, so that all replicas meet them in the
same order.

Source: all_reduce_deps_pass.cc, sequential_execution_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph.across import GATHERS, SUMS
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import SHARED, Graph, OpHandle


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


def run_in_program_order(graph: Graph) -> Graph:
    """Chain the handles of each replica. A handle of all replicas ends and begins every chain."""
    rewriter = Rewriter(graph)
    last: dict[int, int] = {}
    for handle in graph.handles:
        mine = _replicas(graph, handle)
        kept = rewriter.keep(handle, control={last[r] for r in mine if r in last})
        last.update(dict.fromkeys(mine, kept.index))
    return rewriter.finish()


def _replicas(graph: Graph, handle: OpHandle) -> set[int]:
    """The replicas whose memory a handle touches; all of them if it touches none's own."""
    names = (*handle.reads(), *handle.makes(), *handle.op.writes)
    own = {graph.variables[n].replica for n in names} | {handle.replica}
    return {r for r in own if r != SHARED} if handle.kind == "computation" else set(range(graph.num_replicas))
