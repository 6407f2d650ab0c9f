"""The matmuls of a program as the question which kernel they run on: what the graph's pass and the Executor share.

A matmul is `aten.mm`, `aten.addmm`, `aten.bmm` or a `penstock.product` of a pass, on float32. Its `Product` has the
sizes of one replica's run, those that follow the batch rounded. An activation behind it is no part of the question:
whether it is fused depends on what is fetched, and the bits of a matmul do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from penstock.graph.choice import MatrixKernels
from penstock.native.matrix_cache import store_of_machine
from penstock.native.matrix_kernels import LEAST_FLOP, Conditions, KernelTimes, Product, forced, rounded
from penstock.native.matrix_probe import available
from penstock.native.matrix_timing import measure
from penstock.program.ir import Operator, Ref, VarDesc

PRODUCT = "penstock.product.default"
_BIASED = {"aten.addmm.default"}
_PLAIN = {"aten.mm.default", "aten.bmm.default"}
SWAPS = {"aten.t.default": ((),), "aten.transpose.int": ((-2, -1), (-1, -2), (0, 1), (1, 0), (1, 2), (2, 1))}

Choose = Callable[[list[Product], Conditions], dict[Product, str]]


@functools.cache
def known_times() -> KernelTimes:
    """Return the times of this process: one for all graphs and Executors, so that equal products run equal kernels."""
    return KernelTimes(store_of_machine(), measure, available=available)


def kernels_of(
    products: Iterable[Product], settings: MatrixKernels, at_once: int, choose: Choose | None = None
) -> dict[Product, str]:
    """Return the kernel of each product that is worth a choice; the others run torch's.

    `at_once`: operators that run at a time, of those that `settings` allow. Cost: that of `KernelTimes.choose`.
    """
    if settings.forced:
        return {product: forced(product, settings.forced, available()) for product in products}
    worth = {product: replace(product, activation="none") for product in products if product.flop >= LEAST_FLOP}
    if not worth:
        return {}
    kernels = (choose or known_times().choose)(list(worth.values()), Conditions(at_once, settings.intra_op))
    return {product: kernels[plain] for product, plain in worth.items()}


def operands_of(op: Operator) -> tuple[Ref, Ref, Ref | None, str] | None:
    """Return (x, w, bias, activation) of an operator that multiplies, None for any other."""
    if op.kwargs or op.writes or len(op.output_names()) != 1:
        return None
    refs = [a for a in op.args if isinstance(a, Ref)]
    if op.type in _BIASED and len(refs) == len(op.args) == 3:
        return refs[1], refs[2], refs[0], "none"
    if op.type in _PLAIN and len(refs) == len(op.args) == 2:
        return refs[0], refs[1], None, "none"
    return _fused_operands(op, refs) if op.type == PRODUCT else None


def _fused_operands(op: Operator, refs: list[Ref]) -> tuple[Ref, Ref, Ref | None, str] | None:
    """The operands of a product that a pass made; one that reads transposed is left as it is."""
    if any(op.args[3:5]):
        return None
    return refs[0], refs[1], refs[2] if len(refs) == 3 else None, str(op.args[5])


def through_view(operand: Ref, maker: Operator | None, dims_of: Callable[[str], int]) -> tuple[Ref, bool]:
    """Return what a transposing view is a view of, and whether it is one.

    `maker`: the operator that makes the operand, if there is one. `dims_of`: number of dimensions of a variable.
    """
    if maker is None or maker.type not in SWAPS or not isinstance(maker.args[0], Ref):
        return operand, False
    base = maker.args[0]
    dims, swapped = dims_of(base.name), maker.args[1:]
    last_two = not swapped or {int(str(d)) % dims for d in swapped} == {dims - 2, dims - 1}
    return (base, True) if last_two else (operand, False)


def sizes_of(var: VarDesc | None, bindings: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the sizes of a float32 variable, those that follow the batch rounded; None for any other variable."""
    if var is None or var.dtype != "float32":
        return None
    return tuple(d if isinstance(d, int) else rounded(d.evaluate(bindings)) for d in var.shape)


def is_row(var: VarDesc | None) -> bool:
    """Whether a variable can be the bias of a product."""
    return var is not None and len(var.shape) == 1 and var.dtype == "float32"


def product_of(
    left: tuple[int, ...] | None,
    right: tuple[int, ...] | None,
    *,
    transpose_x: bool,
    transpose_w: bool,
    bias: bool,
    activation: str = "none",
) -> Product | None:
    """Return the product of two operands with these sizes in memory; None if they are no two matrices, or batches."""
    if left is None or right is None or len(left) != len(right) or len(left) not in (2, 3):
        return None
    if transpose_x:
        left = (*left[:-2], left[-1], left[-2])
    if transpose_w:
        right = (*right[:-2], right[-1], right[-2])
    batch = left[0] if len(left) == 3 else 0
    return Product(left[-2], left[-1], right[-1], transpose_x, transpose_w, bias, activation, batch)
