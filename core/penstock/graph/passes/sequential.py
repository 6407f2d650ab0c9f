"""Sequential order: on each replica one operator runs after another, in the order of the Program.

Source: enable_sequential_execution, sequential_execution_pass.cc (Fluid 1.8). Exchanges between replicas take part in
the chain of every replica whose tensors they read or write, so that all replicas meet them in the same order.
"""

from __future__ import annotations

from penstock.graph.passes.rewrite import Rewriter
from penstock.graph.ssa import SHARED, Graph, OpHandle


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
