"""Batch normalisation over the batch of all replicas, forward and backward: local sums, an exchange, the result.

Each `native_batch_norm` in training, and its backward, becomes three steps: every replica adds up its share
(`penstock.batch_norm_stats`, `batch_norm_grad_stats`), the sums are gathered, and every replica finishes with the sums
of all. Shares count by their rows, so that uneven ones train like the whole batch; running statistics are equal on all
replicas that have rows. Gradients of scale and shift are those of the share: they are exchanged like every gradient.
Normalisation by running statistics, and graphs in which one replica has rows, stay as they are. So does what is not
over rows: torch's instance norm is a batch-norm of one row whose channels are those of all rows, one after another.

Fluid runs such a program in sequential order, because its exchange deadlocks when replicas meet in another order. Here
the exchange is a handle of the graph, and its edges are the order.

Source: sync_batch_norm_pass.cc, sync_batch_norm_op.cu (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import Bug, ProgramError
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import SHARED, Graph, OpHandle, Physical
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Arg, Operator, Ref, VarDesc, sub_blocks
from penstock.program.program import Program

# Type -> positions of the operand that is normalised, and of the argument that says whether it trains.
_FORWARD = {"aten.native_batch_norm.default": (0, 5), "aten._native_batch_norm_legit.default": (0, 5)}
_BACKWARD = {"aten.native_batch_norm_backward.default": (1, 7)}


def synchronize_batch_norm(graph: Graph, program: Program) -> Graph:
    """Replace batch-norm on each replica by batch-norm over all.

    Raises ProgramError for another dtype than floats, and for one within a branch or a loop, which is one handle.
    """
    for op in program.operators:
        _refuse_within(op)
    if graph.active == 1:
        return graph
    rewriter = Rewriter(graph)
    batch = frozenset().union(*(_symbols(feed.shape[0]) for feed in program.feeds() if feed.shape))
    waiting: list[OpHandle] = []
    for handle in graph.handles:
        if not (_trains(handle.op) and _is_over_rows(graph, program, handle.op, batch)):
            if waiting:
                raise Bug(f"{handle.op.name!r} stands between the replicas of {waiting[0].op.name!r}")
            rewriter.keep(handle)
            continue
        waiting.append(handle)
        if len(waiting) == graph.active:
            _check(graph, program, waiting)
            _replace(rewriter, waiting)
            waiting = []
    return rewriter.finish()


def _refuse_within(op: Operator) -> None:
    for inner in (one for block in sub_blocks(op) for one in block.operators):
        if _trains(inner):
            raise ProgramError(
                f"operator {inner.name!r} ({inner.source}) normalises within a block of control flow, where replicas "
                "cannot wait for one another. Set BuildStrategy.sync_batch_norm = False, or normalise outside",
                operator=inner.name,
            )
        _refuse_within(inner)


def has_batch_norm(program: Program) -> bool:
    """Whether a program normalises by what a batch shows."""
    return any(_trains(op) for op in program.operators)


def _trains(op: Operator) -> bool:
    found = _FORWARD.get(op.type, _BACKWARD.get(op.type))
    return found is not None and op.args[found[1]] is True


def _operand(graph: Graph, program: Program, op: Operator) -> VarDesc:
    """What a batch-norm, or its backward, normalises."""
    position, _ = _FORWARD.get(op.type) or _BACKWARD[op.type]
    operand = op.args[position]
    assert isinstance(operand, Ref)
    return program.variables[graph.variables[operand.name].name]


def _is_over_rows(graph: Graph, program: Program, op: Operator, batch: frozenset[str]) -> bool:
    """Whether a replica has some of the rows, and every replica all of the channels."""
    shape = _operand(graph, program, op).shape
    return bool(_symbols(shape[0]) & batch) and isinstance(shape[1], int)


def _symbols(size: Dim) -> frozenset[str]:
    return size.symbols() if isinstance(size, Expr) else frozenset()


def _check(graph: Graph, program: Program, handles: Sequence[OpHandle]) -> None:
    op = handles[0].op
    if len({h.op.name for h in handles}) > 1:
        raise Bug(f"the replicas run {[h.op.name for h in handles]} side by side; expected one operator")
    dtype = _operand(graph, program, op).dtype
    if dtype not in ("float32", "float64"):
        raise ProgramError(
            f"operator {op.name!r} ({op.source}) normalises {dtype}; sync_batch_norm works on float32 and float64",
            operator=op.name,
        )


def _replace(rewriter: Rewriter, handles: Sequence[OpHandle]) -> None:
    op = handles[0].op
    everything = rewriter.declare(
        Physical(f"{op.name}.sums", f"{op.name}.sums", SHARED, f"{op.name}.sums", False, False)
    )
    own = []
    for handle in handles:
        key = f"{op.name}.share#{handle.replica}"
        own.append(rewriter.declare(Physical(key, f"{op.name}.share", handle.replica, key, False, False)))
        rewriter.put("computation", _sums(handle.op, own[-1]), handle.replica, handle.rows_of)
    gather = Operator(
        f"gather.{op.name}",
        "aten.stack.default",
        (tuple(Ref(k) for k in own), 0),
        (everything,),
        role=op.role,
        module=op.module,
        source=op.source,
    )
    rewriter.put("gather", gather, SHARED, 0)
    for handle, key in zip(handles, own, strict=True):
        finish = _finish(handle.op, Ref(key), Ref(everything))
        rewriter.put("computation", finish, handle.replica, handle.rows_of, [handle])


def _sums(op: Operator, result: str) -> Operator:
    """What a replica adds up."""
    if op.type in _FORWARD:
        kind, args = "penstock.batch_norm_stats.default", op.args[:1]
    else:
        kind, args = "penstock.batch_norm_grad_stats.default", (*op.args[:2], *op.args[5:7])
    return replace(op, name=f"{op.name}.share", type=kind, args=args, outputs=(result,), writes=(), role_vars=())


def _finish(op: Operator, own: Ref, everything: Ref) -> Operator:
    """What a replica makes of the sums of all."""
    args: tuple[Arg, ...]
    if op.type in _FORWARD:
        x, weight, bias, mean, variance, _, momentum, epsilon = op.args
        args = (x, weight, bias, mean, variance, everything, momentum, epsilon)
        return replace(op, type="penstock.sync_batch_norm.default", args=args)
    grad, x, weight, _, _, mean, inverse, *_ = op.args
    args = (grad, x, weight, mean, inverse, own, everything)
    return replace(op, type="penstock.sync_batch_norm_backward.default", args=args)
