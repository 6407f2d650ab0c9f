"""The kernels of an Executor's matmuls: those that an engine takes for the same products in this process.

An engine has its matmuls rewritten by a pass; an Executor calls operators one by one, and asks for the kernel of each
matmul by the sizes of a run. Results of the two are equal to the bit, as far as the other operators are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.graph.choice import MatrixKernels
from penstock.graph.matmuls import PRODUCT, is_row, kernels_of, operands_of, product_of, sizes_of, through_view
from penstock.native import ops as _registered  # noqa: F401 - registers penstock.product
from penstock.native.matrix_kernels import Product
from penstock.program.ir import Operator, Ref, VarDesc
from penstock.program.program import Program

_MOST_SIZES = 32
Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Matmul:
    """The variables that a matmul multiplies as they lie in memory, and how it reads them."""

    x: VarDesc | None
    w: VarDesc | None
    transpose_x: bool
    transpose_w: bool
    bias: bool

    def product(self, bindings: Mapping[str, int]) -> Product | None:
        """Return the product for the sizes of a run; None if it is not one of float32."""
        return product_of(
            sizes_of(self.x, bindings), sizes_of(self.w, bindings), transpose_x=self.transpose_x,
            transpose_w=self.transpose_w, bias=self.bias,
        )  # fmt: skip

    def by(self, kernel: str) -> Kernel:
        """Return the function that stands for the operator: the same operands, the same result, another kernel."""
        multiply = torch.ops.penstock.product.default

        def call(*args: torch.Tensor) -> Any:
            x, w = args[-2:]
            bias = args[0] if self.bias else None
            x, w = x.mT if self.transpose_x else x, w.mT if self.transpose_w else w
            return multiply(x, w, bias, self.transpose_x, self.transpose_w, "none", kernel)

        return call


class Matmuls:
    """The matmuls of a program's operators. `settings`: with one operator at a time."""

    def __init__(self, program: Program, settings: MatrixKernels) -> None:
        self._settings = settings
        self._found = _matmuls(program)
        self._chosen: dict[tuple[Product | None, ...], dict[int, Kernel]] = {}

    def chosen(self, bindings: Mapping[str, int]) -> Mapping[int, Kernel]:
        """Return, by the position of the operator, what to call instead of its own kernel, with the sizes of a run.

        Cost: linear in the matmuls; what `KernelTimes.choose` costs for products that this process has not met.
        """
        products = {position: matmul.product(bindings) for position, matmul in self._found.items()}
        key = tuple(products.values())
        found = self._chosen.get(key)  # once: another thread may empty it
        if found is None:
            if len(self._chosen) >= _MOST_SIZES:
                self._chosen.clear()
            kernels = kernels_of([p for p in key if p is not None], self._settings, 1)
            taken = {i: kernels.get(p, "torch") for i, p in products.items() if p is not None}
            found = {i: self._found[i].by(kernel) for i, kernel in taken.items() if kernel != "torch"}
            self._chosen[key] = found
        return found


def _matmuls(program: Program) -> dict[int, _Matmul]:
    operators = program.global_block().operators
    if not any(operands_of(op) for op in operators):
        return {}
    variables, makers = program.variables, {name: op for op in operators for name in op.output_names()}
    found: dict[int, _Matmul] = {}
    for position, op in enumerate(operators):
        operands = operands_of(op)
        if operands is None or op.type == PRODUCT:
            continue
        x, w, bias, _ = operands
        (x, transpose_x), (w, transpose_w) = (_through(one, makers, program) for one in (x, w))
        if bias is None or is_row(variables.get(bias.name)):
            of_x, of_w = variables.get(x.name), variables.get(w.name)
            found[position] = _Matmul(of_x, of_w, transpose_x, transpose_w, bias is not None)
    return found


def _through(operand: Ref, makers: Mapping[str, Operator], program: Program) -> tuple[Ref, bool]:
    return through_view(operand, makers.get(operand.name), lambda name: len(program.variables[name].shape))
