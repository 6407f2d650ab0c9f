"""Max pooling by windows of 2 x 2, two apart, with a relu before it: `penstock.max_pool_2x2` and its gradient.

Torch's operator makes an int64 position for each window by branches that a processor cannot predict; this one a byte,
which only its gradient reads. So the positions must have no other reader. A relu whose result is read by the pooling
and by gradients of the two alone joins them: its result is not made. Images of even height and width, float32 or
float64; all others are left to torch. Results are equal to the bit. `kept` (what is fetched) is still made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.graph.analysis.liveness import Readers
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.program import Program

POOL = "aten.max_pool2d_with_indices.default"
FUSED = "penstock.max_pool_2x2.default"
_BACK, _FUSED_BACK = "aten.max_pool2d_with_indices_backward.default", "penstock.max_pool_2x2_backward.default"
_RELU, _RELU_BACK = "aten.relu.default", "aten.threshold_backward.default"
_DEFAULTS: tuple[Arg, ...] = ((2, 2), (2, 2), (0, 0), (1, 1), False)  # window, steps, padding, dilation, ceil_mode
_WIDEST = 4096  # kWidestPool of native/src/ops/pool.h


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pooling, its gradient if there is one, and a relu before it with its gradient if they join."""

    forward: OpHandle
    backward: OpHandle | None = None
    relu: OpHandle | None = None
    relu_backward: OpHandle | None = None


def fuse_max_pool(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, with its poolings of this kind replaced. Linear in the handles."""
    if not any(h.op.type == POOL for h in graph.handles):
        return graph
    readers = Readers(graph, kept)
    makers = {n: h for h in graph.handles for n in h.makes()}
    found = [p for h in graph.handles if (p := _pool(h, graph, program, makers, readers)) is not None]
    if not found:
        return graph
    made = {(p.relu or p.forward).index: p for p in found}  # reads nothing later, so it may move up to the relu
    back = {p.backward.index: p for p in found if p.backward is not None}
    gone = {h.index for p in found for h in (p.forward, p.relu, p.relu_backward) if h is not None} - made.keys()
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index in made:
            _put_forward(rewriter, made[handle.index])
        elif handle.index in back:
            _put_backward(rewriter, handle, back[handle.index])
        elif handle.index not in gone:
            rewriter.keep(handle)
    return rewriter.finish()


def _pool(
    handle: OpHandle, graph: Graph, program: Program, makers: dict[str, OpHandle], readers: Readers
) -> _Pool | None:
    if not _is_by_two(handle.op) or len(handle.makes()) != 2 or not _fits(handle, graph, program):
        return None
    x, places = handle.reads()[0], handle.makes()[1]
    readers_of_places = readers.all_of(places)
    if readers_of_places is None or len(readers_of_places) > 1:
        return None
    backward = readers_of_places[0] if readers_of_places else None
    if backward is not None and not _is_gradient_of(backward, handle):
        return None
    alone = _Pool(handle, backward)
    maker = makers.get(x)
    return alone if maker is None else _with_relu(alone, maker, x, readers)


def _with_relu(pool: _Pool, relu: OpHandle, x: str, readers: Readers) -> _Pool:
    """The same pooling with the relu that makes x, if x is read by nothing else."""
    found = readers.all_of(x)
    own = {h.index for h in (pool.forward, pool.backward) if h is not None}
    if relu.op.type != _RELU or relu.op.kwargs or relu.replica != pool.forward.replica or found is None:
        return pool
    others = [h for h in found if h.index not in own]
    if pool.backward is None:
        return pool if others else replace(pool, relu=relu)
    gradient = readers.only_one(pool.backward.makes()[0])
    if gradient is None or others != [gradient] or not _is_gradient_of_relu(gradient, pool.backward, x):
        return pool
    return replace(pool, relu=relu, relu_backward=gradient)


def _is_by_two(op: Operator) -> bool:
    given = op.args[1:]
    return op.type == POOL and not op.kwargs and len(given) >= 2 and given == _DEFAULTS[: len(given)]


def _fits(handle: OpHandle, graph: Graph, program: Program) -> bool:
    """Whether the kernel has this dtype and these sizes."""
    found = program.variables.get(graph.variables[handle.reads()[0]].name)
    if found is None or found.dtype not in ("float32", "float64") or len(found.shape) != 4:
        return False
    height, width = found.shape[2:]
    if not isinstance(height, int) or not isinstance(width, int):
        return False
    return height % 2 == width % 2 == 0 < min(height, width) and width <= _WIDEST


def _is_gradient_of(backward: OpHandle, forward: OpHandle) -> bool:
    op = backward.op
    expected = (forward.op.args[0], *_DEFAULTS, Ref(forward.makes()[1]))
    return op.type == _BACK and not op.kwargs and op.args[1:] == expected and backward.replica == forward.replica


def _is_gradient_of_relu(handle: OpHandle, backward: OpHandle, x: str) -> bool:
    expected = (Ref(backward.makes()[0]), Ref(x), 0)
    return handle.op.type == _RELU_BACK and handle.op.args == expected and handle.replica == backward.replica


def _put_forward(rewriter: Rewriter, pool: _Pool) -> None:
    first = pool.relu or pool.forward
    stands_for = [h for h in (pool.relu, pool.forward) if h is not None]
    args = (first.op.args[0], pool.relu is not None)
    op = replace(pool.forward.op, type=FUSED, args=args)
    parts = tuple(h.op for h in stands_for)
    rewriter.put(pool.forward.kind, op, first.replica, pool.forward.rows_of, stands_for, parts=parts)


def _put_backward(rewriter: Rewriter, handle: OpHandle, pool: _Pool) -> None:
    stands_for = [h for h in (handle, pool.relu_backward) if h is not None]
    args = (handle.op.args[0], Ref(pool.forward.makes()[1]))
    op = replace(handle.op, type=_FUSED_BACK, args=args, outputs=stands_for[-1].op.outputs)
    parts = tuple(h.op for h in stands_for)
    rewriter.put(handle.kind, op, handle.replica, handle.rows_of, stands_for, parts=parts)
