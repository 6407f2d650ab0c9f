"""The exchange of a large dense gradient is cut into parts, which run on as many workers.

An exchange is one instruction, and an instruction runs on one worker: a large gradient would be summed at the rate of
one core while the others wait for it. Each part sums its own elements of the same tensors (`ssa.are_disjoint`), in the
order of the replicas, so the bits are those of the whole exchange. Only CPU graphs have parts.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph.passes.gradient_bytes import gradient_bytes
from penstock.graph.passes.rewrite import Rewriter
from penstock.graph.ssa import PARTS, Graph, OpHandle
from penstock.program.program import Program

LARGE_BYTES = 1 << 20
"""A gradient of more bytes is exchanged by itself, in parts: less is done before a second worker has woken."""
_PART_BYTES = 1 << 18


def split_exchanges(graph: Graph, program: Program, at_once: int) -> Graph:
    """Cut large exchanges into parts, at most `at_once`: as many as operators run at a time. Linear in the handles."""
    counts = {h.index: _num_parts(graph, program, h, at_once) for h in graph.handles}
    if all(count == 1 for count in counts.values()):
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        count = counts[handle.index]
        if count == 1:
            rewriter.keep(handle)
            continue
        for part in range(count):
            op = replace(
                handle.op,
                name=f"{handle.op.name}.part{part}",
                type=PARTS[handle.op.type],
                args=(*handle.op.args, part, count),
            )
            rewriter.keep(handle, op)
    return rewriter.finish()


def _num_parts(graph: Graph, program: Program, handle: OpHandle, at_once: int) -> int:
    if handle.op.type not in PARTS:
        return 1
    name = graph.variables[handle.op.writes[0]].name
    num_bytes = gradient_bytes(program, name) if name in program.variables else 0
    return max(1, min(at_once, num_bytes // _PART_BYTES)) if num_bytes > LARGE_BYTES else 1
