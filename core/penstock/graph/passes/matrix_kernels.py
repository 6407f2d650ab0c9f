"""Matrix kernels: each product runs on the kernel that was measured to be the fastest for its sizes and layout.

A product is `aten.mm`, `aten.addmm`, `aten.bmm` or a `penstock.product` of another pass, on float32. Where torch's
kernel stays, the handle stays as it is. Where another one is faster, `penstock.product` takes its place: it reads
through the `t()` of an operand, adds the bias and applies a following relu that is the only reader, so that the views
and the relu have no handle any more. What is in `kept` (what is fetched) is still made.

Results differ from torch's in the order of the sums: by some units in the last place of the largest partial sum.
Source: DESIGN section 2, "Matrix kernels are chosen, not inherited"; docs/matrix-kernels.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from penstock.graph.analysis.liveness import Readers, drop_unread
from penstock.graph.choice import MatrixKernels
from penstock.graph.matmuls import (
    PRODUCT,
    SWAPS,
    Choose,
    is_row,
    kernels_of,
    operands_of,
    product_of,
    sizes_of,
    through_view,
)
from penstock.graph.operands import Shares
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.native.matrix_kernels import Product
from penstock.program.ir import Arg, Operator, Ref, VarDesc
from penstock.program.program import Program

_RELU = "aten.relu.default"


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
    at_once = min(settings.at_once, graph.active)
    kernels = kernels_of((c.product for c in calls.values()), settings, at_once, choose)
    taken = {index: call for index, call in calls.items() if kernels.get(call.product, "torch") != "torch"}
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
    return drop_unread(rewriter.finish(), kept, SWAPS)


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
        parts = operands_of(handle.op)
        if parts is None:
            return None
        x, w, bias, activation = parts
        (x, transpose_x), (w, transpose_w) = self._through_view(x), self._through_view(w)
        if bias is not None and not is_row(self._variable(bias.name)):
            return None
        relu = self._relu_after(handle) if activation == "none" else None
        bindings = self.shares.bindings[handle.rows_of]
        left, right = (sizes_of(self._variable(operand.name), bindings) for operand in (x, w))
        product = product_of(
            left, right, transpose_x=transpose_x, transpose_w=transpose_w, bias=bias is not None,
            activation=activation if relu is None else "relu",
        )  # fmt: skip
        return None if product is None else _Call(x, w, bias, product, relu)

    def _through_view(self, operand: Ref) -> tuple[Ref, bool]:
        maker = self.maker.get(operand.name)
        dims = self.program.variables
        return through_view(
            operand, None if maker is None else maker.op, lambda name: len(dims[self.graph.variables[name].name].shape)
        )

    def _variable(self, name: str) -> VarDesc | None:
        return self.program.variables.get(self.graph.variables[name].name)

    def _relu_after(self, handle: OpHandle) -> OpHandle | None:
        """The relu that is the only reader of a product, on the same replica."""
        (made,) = handle.makes()
        reader = self.readers.only_one(made)
        joins = reader is not None and reader.op.type == _RELU and reader.replica == handle.replica
        return reader if joins else None
