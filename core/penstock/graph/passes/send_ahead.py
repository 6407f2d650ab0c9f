"""Gradients that leave for their servers while the rest of the backward pass is computed.

`send_step` pushes all of a step at its end, when nothing is left to compute while its bytes travel. `send_ahead` sends
dense gradients over the same connection as soon as a group of them is ready; servers keep them until the step's message
comes, which brings the rest and closes the step. It remains the step's only request: `send_step` still has every
gradient, and pushes it if anything has gone wrong. To a server on the same host nothing is sent ahead.

A group has at least `GROUP_BYTES`: a message costs more than smaller ones gain. Gradients of rows, which are summed
before they are sent, wait for the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.graph.passes.exchanges import gradient_bytes
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle, Physical
from penstock.program.ir import Ref
from penstock.program.program import Program
from penstock.ps.remote import SEND_AHEAD, SEND_STEP

GROUP_BYTES = 1 << 18


def send_ahead(graph: Graph, program: Program) -> Graph:
    """Return the graph, built from `program`, with a `send_ahead` for each group of gradients of a `send_step`."""
    groups = {h.index: _groups(graph, program, h) for h in graph.handles if h.op.type == SEND_STEP}
    if not any(groups.values()):
        return graph
    rewriter = Rewriter(graph)
    tokens: dict[int, list[str]] = {index: [] for index in groups}
    for handle in graph.handles:
        if handle.index in groups:
            *args, after, remote, spec = handle.op.args
            assert isinstance(after, tuple)
            ahead = tuple(Ref(token) for token in tokens[handle.index])
            rewriter.keep(handle, replace(handle.op, args=(*args, (*after, *ahead), remote, spec)))
        else:
            rewriter.keep(handle)
        for index, of in groups.items():
            for group in of:
                if group.ready == handle.index:
                    tokens[index].append(_put(rewriter, graph.handles[index], group, len(tokens[index])))
    return rewriter.finish()


@dataclass(slots=True)
class _Group:
    """Gradients that leave together, of the blocks `blocks` at the servers `at`, when the handle `ready` has run."""

    ready: int = 0
    num_bytes: int = 0
    values: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    at: list[int] = field(default_factory=list)


def _groups(graph: Graph, program: Program, step: OpHandle) -> list[_Group]:
    """Return the groups of a step, without what is ready only when nothing is left to compute."""
    computes = [h.index for h in graph.handles[: step.index] if h.kind != "rpc"]
    last = computes[-1] if computes else -1
    out, group = [], _Group()
    for ready, value, block, server in sorted(_dense(graph, step)):
        group.ready, group.num_bytes = ready, group.num_bytes + gradient_bytes(program, graph.variables[value].name)
        group.values.append(value)
        group.blocks.append(block)
        group.at.append(server)
        if group.num_bytes >= GROUP_BYTES:
            out.append(group)
            group = _Group()
    return [group for group in out if group.ready < last]


def _dense(graph: Graph, step: OpHandle) -> Iterator[tuple[int, str, str, int]]:
    """Yield of each block's gradient: the last handle that writes its memory, name, block, server."""
    written: dict[str, int] = {}
    made: dict[str, int] = {}
    for handle in graph.handles[: step.index]:
        made |= dict.fromkeys(handle.makes(), handle.index)
        for name in (*handle.op.writes, *handle.makes()):
            if name in handle.op.writes or graph.variables[name].storage == name:
                written[graph.variables[name].storage] = handle.index
    values = step.op.args[0]
    assert isinstance(values, tuple)
    names = [value.name for value in values if isinstance(value, Ref)]
    where = [
        (block, server)
        for _, blocks, at, _ in json.loads(str(step.op.args[-1]))["dense"]
        for block, server in zip(blocks, at, strict=True)
    ]
    for name, (block, server) in zip(names, where, strict=True):
        yield max(written.get(graph.variables[name].storage, -1), made.get(name, -1)), name, block, server


def _put(rewriter: Rewriter, step: OpHandle, group: _Group, number: int) -> str:
    token = f"{step.op.outputs[0]}@AHEAD{number}"
    rewriter.declare(Physical(token, token, step.replica, token, persistable=False, feed=False))
    args = (tuple(Ref(n) for n in group.values), step.op.args[-2], tuple(group.blocks), tuple(group.at))
    op = replace(step.op, name=f"{step.op.name}.ahead{number}", type=SEND_AHEAD, args=args, outputs=(token,))
    rewriter.put(step.kind, op, step.replica, step.rows_of)
    return token
