"""Matrix kernels: each product runs on the kernel that was measured to be the fastest for its sizes and layout.

A product is `aten.mm`, `aten.addmm`, `aten.bmm` or a `penstock.product` of another pass, on float32. Where torch's
kernel stays, the handle stays as it is. Where another one is faster, `penstock.product` takes its place: it reads
through the `t()` of an operand, adds the bias and applies a following relu that is the only reader, so that the views
and the relu have no handle any more. What is in `kept` (what is fetched) is still made.

Results differ from torch's in the order of the sums: by some units in the last place of the largest partial sum.
Source: DESIGN section 2, "Matrix kernels are chosen, not inherited"; docs/matrix-kernels.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from penstock.graph.analysis.liveness import Readers, drop_unread
from penstock.graph.choice import MatrixKernels
from penstock.graph.operands import Shares
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.native.matrix_cache import store_of_machine
from penstock.native.matrix_kernels import LEAST_FLOP, Conditions, KernelTimes, Product, forced, rounded
from penstock.native.matrix_probe import available
from penstock.native.matrix_timing import measure
from penstock.program.expr import Dim
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.program import Program

PRODUCT = "penstock.product.default"
_BIASED = {"aten.addmm.default"}
_PLAIN = {"aten.mm.default", "aten.bmm.default"}
_RELU = "aten.relu.default"
_SWAPS = {"aten.t.default": ((),), "aten.transpose.int": ((-2, -1), (-1, -2), (0, 1), (1, 0), (1, 2), (2, 1))}

Choose = Callable[[list[Product], Conditions], dict[Product, str]]


@functools.cache
def known_times() -> KernelTimes:
    """Return the times of this process: one for all graphs, so that equal products run equal kernels."""
    return KernelTimes(store_of_machine(), measure, available=available)


@dataclass(frozen=True, slots=True)
class _Call:
    """A product as a handle makes it: operands under their transposes, and the relu that follows, if it can join."""

    x: Ref
    w: Ref
    bias: Ref | None
    product: Product
    relu: OpHandle | None


def choose_matrix_kernels(
    graph: Graph,
    program: Program,
    settings: MatrixKernels,
    shares: Shares,
    kept: Collection[str] = (),
    choose: Choose | None = None,
) -> Graph:
    """Return the graph with a kernel chosen for each product. `kept`: variables that must still be made.

    Cost: what `KernelTimes.choose` costs, once for a product; else linear in the handles.
    """
    calls = _Calls(graph, program, shares, kept).found()
    wanted = [c.product for c in calls.values()]
    if settings.forced:
        kernels = {product: forced(product, settings.forced, available()) for product in wanted}
    elif any(p.flop >= LEAST_FLOP for p in wanted):
        calls = {index: c for index, c in calls.items() if c.product.flop >= LEAST_FLOP}
        wanted = [c.product for c in calls.values()]
        conditions = Conditions(min(settings.at_once, graph.active), settings.intra_op)
        kernels = (choose or known_times().choose)(wanted, conditions)
    else:
        return graph
    taken = {index: call for index, call in calls.items() if kernels[call.product] != "torch"}
    return _rewritten(graph, kept, taken, kernels) if taken else graph


def _rewritten(
    graph: Graph, kept: Collection[str], taken: Mapping[int, _Call], kernels: Mapping[Product, str]
) -> Graph:
    rewriter = Rewriter(graph)
    joined = {call.relu.index for call in taken.values() if call.relu is not None}
    for handle in graph.handles:
        call = taken.get(handle.index)
        if call is not None:
            last = call.relu or handle
            op = _operator(handle.op, last.op, call, kernels[call.product])
            rewriter.put(handle.kind, op, handle.replica, handle.rows_of, [handle, *([call.relu] if call.relu else [])])
        elif handle.index not in joined:
            rewriter.keep(handle)
    return drop_unread(rewriter.finish(), kept, _SWAPS)


def _operator(op: Operator, last: Operator, call: _Call, kernel: str) -> Operator:
    p = call.product
    args: tuple[Arg, ...] = (call.x, call.w, call.bias, p.transpose_x, p.transpose_w, p.activation, kernel)
    return replace(
        op, type=PRODUCT, args=args, kwargs=(), outputs=last.outputs, role_vars=op.role_vars + last.role_vars
    )


class _Calls:
    """Finds the products of a graph that a kernel can be chosen for."""

    def __init__(self, graph: Graph, program: Program, shares: Shares, kept: Collection[str]) -> None:
        self.graph, self.program, self.shares = graph, program, shares
        self.readers = Readers(graph, kept)
        self.maker = {name: h for h in graph.handles for name in h.makes()}

    def found(self) -> dict[int, _Call]:
        """Return the products by the index of their handle."""
        calls = {h.index: self._call(h) for h in self.graph.handles if h.kind == "computation"}
        return {index: call for index, call in calls.items() if call is not None}

    def _call(self, handle: OpHandle) -> _Call | None:
        parts = _operands(handle.op)
        if parts is None or handle.op.writes:
            return None
        x, w, bias, activation = parts
        (x, transpose_x), (w, transpose_w) = self._through_view(x), self._through_view(w)
        sizes = self._sizes(handle, x, w, transpose_x, transpose_w)
        if sizes is None or (bias is not None and not self._is_row(bias)):
            return None
        relu = self._relu_after(handle) if activation == "none" else None
        batch, m, k, n = sizes
        activation = "relu" if relu is not None else activation
        product = Product(m, k, n, transpose_x, transpose_w, bias is not None, activation, batch)
        return _Call(x, w, bias, product, relu)

    def _through_view(self, operand: Ref) -> tuple[Ref, bool]:
        """Return what a transposing view is a view of, and whether it is one."""
        maker = self.maker.get(operand.name)
        if maker is None or maker.op.type not in _SWAPS or not isinstance(maker.op.args[0], Ref):
            return operand, False
        base = maker.op.args[0]
        dims = len(self.program.variables[self.graph.variables[base.name].name].shape)
        swapped = maker.op.args[1:]
        last_two = not swapped or {int(str(d)) % dims for d in swapped} == {dims - 2, dims - 1}
        return (base, True) if last_two else (operand, False)

    def _sizes(
        self, handle: OpHandle, x: Ref, w: Ref, transpose_x: bool, transpose_w: bool
    ) -> tuple[int, int, int, int] | None:
        """(batch or 0, m, k, n), those that follow the batch rounded; None if this is no product of float32."""
        left, right = self._shape(handle, x), self._shape(handle, w)
        if left is None or right is None or len(left) != len(right) or len(left) not in (2, 3):
            return None
        if transpose_x:
            left = (*left[:-2], left[-1], left[-2])
        if transpose_w:
            right = (*right[:-2], right[-1], right[-2])
        return (left[0] if len(left) == 3 else 0), left[-2], left[-1], right[-1]

    def _shape(self, handle: OpHandle, operand: Ref) -> tuple[int, ...] | None:
        var = self.program.variables.get(self.graph.variables[operand.name].name)
        if var is None or var.dtype != "float32":
            return None
        bindings = self.shares.bindings[handle.rows_of]
        return tuple(_size(d, bindings) for d in var.shape)

    def _is_row(self, bias: Ref) -> bool:
        var = self.program.variables.get(self.graph.variables[bias.name].name)
        return var is not None and len(var.shape) == 1 and var.dtype == "float32"

    def _relu_after(self, handle: OpHandle) -> OpHandle | None:
        """The relu that is the only reader of a product, on the same replica."""
        (made,) = handle.makes()
        reader = self.readers.only_one(made)
        joins = reader is not None and reader.op.type == _RELU and reader.replica == handle.replica
        return reader if joins else None


def _size(dim: Dim, bindings: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else rounded(dim.evaluate(bindings))


def _operands(op: Operator) -> tuple[Ref, Ref, Ref | None, str] | None:
    """Return (x, w, bias, activation) of an operator that multiplies, None for any other."""
    if op.kwargs or len(op.output_names()) != 1:
        return None
    refs = [a for a in op.args if isinstance(a, Ref)]
    if op.type in _BIASED and len(refs) == len(op.args) == 3:
        return refs[1], refs[2], refs[0], "none"
    if op.type in _PLAIN and len(refs) == len(op.args) == 2:
        return refs[0], refs[1], None, "none"
    return _fused_operands(op, refs) if op.type == PRODUCT else None


def _fused_operands(op: Operator, refs: list[Ref]) -> tuple[Ref, Ref, Ref | None, str] | None:
    """The operands of a product that another pass made; one that reads transposed is left as it is."""
    if any(op.args[3:5]):
        return None
    return refs[0], refs[1], refs[2] if len(refs) == 3 else None, str(op.args[5])
