"""An addition and the activation of its sum become one operator: BuildStrategy.fuse_elewise_add_act_ops.

`relu(x + y)`, and sigmoid, tanh and a multiplication by a number in the place of relu, become `penstock.fused_add_act`;
`relu(b + x @ w)` becomes a `penstock.product` with that activation. The sum must have no other reader: a backward pass
that was recorded from the activation's result (relu, sigmoid, tanh) reads that, and is left as it is.
Only operands of one floating dtype: the operator acts on its sum in place, where torch's activation of integers, or of
a sum of two dtypes, may have another dtype than the sum.
Results are equal to the bit. `kept` (what is fetched) is still made.

Source: fuse_elewise_add_act_pass.cc (Fluid 1.8), which knows relu and scale.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.graph.analysis.liveness import Readers
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.program import Program

_ACTIVATIONS = {"aten.relu.default": "relu", "aten.sigmoid.default": "sigmoid", "aten.tanh.default": "tanh"}
_SCALES = {"aten.mul.Tensor", "aten.mul.Scalar"}
_FLOATING = {"float16", "bfloat16", "float32", "float64"}


def fuse_add_act(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, with sums and their activations fused. Linear in the handles."""
    readers = Readers(graph, kept)
    fused: dict[int, OpHandle] = {}  # handle of a sum -> handle of its activation
    for handle in graph.handles:
        activation = _activation_of(handle, readers)
        if activation is not None and _is_floating(handle, graph, program):
            fused[handle.index] = activation
    if not fused:
        return graph
    rewriter = Rewriter(graph)
    gone = {h.index for h in fused.values()}
    for handle in graph.handles:
        activation = fused.get(handle.index)
        if activation is not None:
            op = _operator(handle.op, activation.op)
            rewriter.put(handle.kind, op, handle.replica, handle.rows_of, [handle, activation])
        elif handle.index not in gone:
            rewriter.keep(handle)
    return rewriter.finish()


def _activation_of(handle: OpHandle, readers: Readers) -> OpHandle | None:
    """The activation that a sum can be fused with."""
    affine = _is_affine(handle.op)
    if not (_is_sum(handle.op) or affine):
        return None
    reader = readers.only_one(handle.makes()[0])
    if reader is None or reader.replica != handle.replica or reader.op.kwargs:
        return None
    found = _act(reader.op)
    return None if found is None or (affine and found[0] == "scale") else reader


def _is_floating(handle: OpHandle, graph: Graph, program: Program) -> bool:
    """Whether all operands have one floating dtype."""
    found = {program.variables.get(graph.variables[name].name) for name in handle.reads()}
    dtypes = {None if variable is None else variable.dtype for variable in found}
    return len(dtypes) == 1 and dtypes <= _FLOATING


def _is_sum(op: Operator) -> bool:
    operands = [a for a in op.args if isinstance(a, Ref)]
    return op.type == "aten.add.Tensor" and not op.kwargs and len(operands) == len(op.args) == 2


def _is_affine(op: Operator) -> bool:
    return op.type == "aten.addmm.default" and not op.kwargs and len(op.args) == 3


def _act(op: Operator) -> tuple[str, float] | None:
    """Return (activation, number to multiply by), None for an operator that is no activation."""
    if op.type in _ACTIVATIONS:
        return _ACTIVATIONS[op.type], 1.0
    if op.type in _SCALES and len(op.args) == 2 and isinstance(op.args[0], Ref):
        number = op.args[1]
        return ("scale", float(number)) if isinstance(number, (int, float)) and not isinstance(number, bool) else None
    return None


def _operator(op: Operator, act: Operator) -> Operator:
    found = _act(act)
    assert found is not None  # the pair was chosen by it
    if _is_affine(op):
        bias, x, w = op.args
        args: tuple[Arg, ...] = (x, w, bias, False, False, found[0], "torch")
        kind = "penstock.product.default"
    else:
        args = (*op.args, *found)
        kind = "penstock.fused_add_act.default"
    return replace(op, type=kind, args=args, outputs=act.outputs, role_vars=op.role_vars + act.role_vars)
