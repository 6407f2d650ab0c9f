"""One broadcast for each owner at the end of the step, instead of one for each parameter.

Only graphs over devices have broadcasts (`graph/devices.py`). Those that nothing follows are fused; a copy that a later
operator of the step reads stays where it is. Each group waits for all its updates: fewer and larger messages against an
earlier start. Source: fuse_broadcast_ops, fused_broadcast_op_handle.cc (Fluid 1.8).
"""

from __future__ import annotations

from penstock.graph.passes.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref, Role

_BROADCAST = "penstock.broadcast_.default"


def fuse_broadcasts(graph: Graph) -> Graph:
    """Fuse the broadcasts at the end of the graph that have one source replica and the same receivers."""
    groups = _groups(graph, _last_broadcasts(graph))
    fused = {h.index for group in groups for h in group}
    if not fused:
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index not in fused:
            rewriter.keep(handle)
    for group in groups:
        rewriter.put("broadcast", _fused(group), group[0].replica, group[0].rows_of, group)
    return rewriter.finish()


def _last_broadcasts(graph: Graph) -> list[OpHandle]:
    waited_for = {b for h in graph.handles for b in h.before}
    return [h for h in graph.handles if h.op.type == _BROADCAST and h.index not in waited_for]


def _groups(graph: Graph, handles: list[OpHandle]) -> list[list[OpHandle]]:
    found: dict[tuple[int, ...], list[OpHandle]] = {}
    for handle in handles:
        receivers = (graph.variables[n].replica for n in handle.op.writes)
        found.setdefault((handle.replica, *receivers), []).append(handle)
    return [group for group in found.values() if len(group) > 1]


def _fused(group: list[OpHandle]) -> Operator:
    """Destinations replica by replica, each in the order of the sources."""
    lists = [h.op.writes for h in group]
    destinations = tuple(names[k] for k in range(len(lists[0])) for names in lists)
    sources: Arg = tuple(Ref(h.op.input_names()[-1]) for h in group)
    args: tuple[Arg, ...] = (tuple(Ref(d) for d in destinations), sources)
    return Operator(
        f"fused_broadcast.{group[0].replica}.{group[0].op.name.removeprefix('broadcast.')}",
        "penstock.fused_broadcast_.default", args, (), writes=destinations, role=Role.DIST,
    )  # fmt: skip
