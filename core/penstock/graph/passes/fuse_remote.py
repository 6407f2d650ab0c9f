"""A step's exchange with servers: one operator pushes all, in sync mode waits, and one pulls all.

An operator for each gradient would let pushes travel while the rest is computed, at the cost of a message, and a copy
of the gradient, which might change before the barrier. Fused, the gradients are operands until the round is applied,
and one message a server has all of them. Async and half-async have no barriers, and a parameter is pulled after its own
push: there all pushes and pulls of a step become one of each, at its last, or the graph stays as it is.

What would change meaning is left out: a gradient that is written again before the barrier, a parameter that is touched
between its pull and the end of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref
from penstock.ps.remote import FETCH_BARRIER, RECV, RECV_STEP, SEND, SEND_BARRIER, SEND_ROWS, SEND_STEP, Descriptor

_REMOTE = {SEND: 1, SEND_ROWS: 2, SEND_BARRIER: 1, RECV: 2, FETCH_BARRIER: 1}
"""Where in its arguments each names its remote; variable, blocks, servers and heights follow."""


def fuse_remote(graph: Graph) -> Graph:
    """Return the graph with one operator for all pushes of a step, and one for all pulls."""
    by_remote: dict[str, list[OpHandle]] = {}
    for handle in graph.handles:
        if handle.op.type in _REMOTE:
            by_remote.setdefault(str(handle.op.args[_REMOTE[handle.op.type]]), []).append(handle)
    for remote, handles in by_remote.items():
        descriptor = Descriptor.parse(remote)
        if descriptor.mode == "sync":
            graph = _fuse_pulls(_fuse_pushes(graph, handles), remote)
        elif descriptor.mode in ("async", "half_async"):
            graph = _fuse_async(graph, handles)
    return graph


def _fuse_async(graph: Graph, handles: Sequence[OpHandle]) -> Graph:
    pushes = [h for h in handles if h.op.type in {SEND, SEND_ROWS}]
    pulls = [h for h in handles if h.op.type == RECV]
    if len(pushes) + len(pulls) < 3 or not pushes:  # one of each is what it would become
        return graph
    end = max(h.index for h in (*pushes, *pulls))
    last, fused = _last_writes(graph, before=end + 1), {h.index for h in (*pushes, *pulls)}
    sent = {n for h in pushes for n in h.makes()}
    others = [h for h in graph.handles[: end + 1] if h.index not in fused]
    stays = (
        any(last.get(graph.variables[n].storage, -1) >= h.index for h in pushes for n in h.reads())
        or any(not sent.isdisjoint(h.reads()) for h in graph.handles if h not in pulls)
        or any(_touches(graph, h, (o for o in others if o.index > h.index)) for h in pulls)
    )
    if stays:
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index not in fused:
            rewriter.keep(handle)
        if handle.index == end:
            first = pushes[-1]
            pushed = push_step([h.op for h in pushes], first.op, ())
            rewriter.put(first.kind, pushed, first.replica, first.rows_of, pushes)
            if pulls:
                waited = [n for h in pulls for n in h.reads() if n not in sent and n not in _written(pulls)]
                after = [*first.op.output_names(), *waited]
                pulled = pull_step([h.op for h in pulls], pulls[-1].op, after)
                rewriter.put(first.kind, pulled, first.replica, first.rows_of, pulls)
    return rewriter.finish()


def _written(pulls: Sequence[OpHandle]) -> set[str]:
    return {n for h in pulls for n in h.op.writes}


def _fuse_pushes(graph: Graph, handles: Sequence[OpHandle]) -> Graph:
    barriers = [h for h in handles if h.op.type == SEND_BARRIER]
    if len(barriers) != 1:
        return graph
    barrier = barriers[0]
    last = _last_writes(graph, before=barrier.index)
    pushes = [
        h
        for h in handles
        if h.op.type in {SEND, SEND_ROWS}
        and h.index < barrier.index
        and _is_only_for(graph, h, barrier)
        and all(last.get(graph.variables[n].storage, -1) < h.index for n in h.reads())
    ]
    if not pushes:
        return graph
    made = {n for h in pushes for n in h.makes()}
    waited = [n for n in barrier.reads() if n not in made]
    return _with_one(graph, pushes, barrier, push_step([h.op for h in pushes], barrier.op, waited))


def _fuse_pulls(graph: Graph, remote: str) -> Graph:
    ends = [h for h in graph.handles if h.op.type == FETCH_BARRIER and h.op.args[1] == remote]
    if len(ends) != 1:
        return graph
    end = ends[0]
    pulls = [
        h
        for h in graph.handles[: end.index]
        if h.op.type == RECV and h.op.args[2] == remote and _is_only_for(graph, h, end)
    ]
    while True:  # one that stays is a reason for others to stay
        fused = {h.index for h in pulls}
        left = [h for h in graph.handles[: end.index] if h.index not in fused]
        kept = [h for h in pulls if not _touches(graph, h, (o for o in left if o.index > h.index))]
        if len(kept) == len(pulls):
            break
        pulls = kept
    if not pulls:
        return graph
    out, made = _written(pulls), {n for h in pulls for n in h.makes()}
    # The pulls' `after`, all once; what the last barrier waits for otherwise stays.
    waited = [n for h in pulls for n in h.reads() if n not in out] + [n for n in end.reads() if n not in made]
    return _with_one(graph, pulls, end, pull_step([h.op for h in pulls], end.op, waited))


def _with_one(graph: Graph, handles: Sequence[OpHandle], end: OpHandle, op: Operator) -> Graph:
    """Return the graph with `op` in the place of `end`, and without `handles`."""
    fused = {h.index for h in handles}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index == end.index:
            rewriter.put(end.kind, op, end.replica, end.rows_of, [*handles, end])
        elif handle.index not in fused:
            rewriter.keep(handle)
    return rewriter.finish()


def push_step(pushes: Sequence[Operator], like: Operator, after: Iterable[str]) -> Operator:
    """Return one operator for all pushes: `like` with their arguments, after the tokens `after`."""
    dense = [op for op in pushes if op.type == SEND]
    sparse = [op for op in pushes if op.type == SEND_ROWS]
    said = [(op.args[2:], len(op.input_names())) for op in dense]
    spec = {
        "dense": [[name, blocks, at, count] for (name, blocks, at), count in said],
        "sparse": [list(op.args[3:]) for op in sparse],
    }
    args: tuple[Arg, ...] = (
        _refs(n for op in dense for n in op.input_names()),
        tuple(op.args[0] for op in sparse),
        tuple(op.args[1] for op in sparse),
        _refs(after),
        like.args[_REMOTE[like.type]],
        json.dumps(spec),
    )
    return replace(like, type=SEND_STEP, args=args)


def pull_step(pulls: Sequence[Operator], like: Operator, after: Iterable[str]) -> Operator:
    """Return one operator for all pulls, as `push_step`."""
    out = tuple(n for op in pulls for n in op.writes)
    args: tuple[Arg, ...] = (
        _refs(out), _refs(dict.fromkeys(after)), like.args[_REMOTE[like.type]],
        tuple(op.args[3] for op in pulls for _ in _list(op.args[4])),
        tuple(b for op in pulls for b in _list(op.args[4])),
        tuple(s for op in pulls for s in _list(op.args[5])),
    )  # fmt: skip
    return replace(like, type=RECV_STEP, args=args, writes=out)


def _list(value: Arg) -> tuple[Arg, ...]:
    assert isinstance(value, tuple)
    return value


def _refs(names: Iterable[str]) -> tuple[Arg, ...]:
    return tuple(Ref(n) for n in names)


def _is_only_for(graph: Graph, handle: OpHandle, end: OpHandle) -> bool:
    """Whether only `end` reads what `handle` makes."""
    made = set(handle.makes())
    return all(h.index == end.index or made.isdisjoint(h.reads()) for h in graph.handles[handle.index + 1 :])


def _last_writes(graph: Graph, before: int) -> dict[str, int]:
    """Return storage -> the last handle before `before` that writes it."""
    return {
        graph.variables[n].storage: h.index for h in graph.handles[:before] for n in (*h.op.writes, *_own(graph, h))
    }


def _own(graph: Graph, handle: OpHandle) -> list[str]:
    return [n for n in handle.makes() if graph.variables[n].storage == n]


def _touches(graph: Graph, handle: OpHandle, others: Iterable[OpHandle]) -> bool:
    """Whether one of `others` reads or writes what `handle` writes."""
    written = {graph.variables[n].storage for n in handle.op.writes}
    return any(
        not written.isdisjoint(graph.variables[n].storage for n in (*h.reads(), *h.op.writes, *h.makes()))
        for h in others
    )
