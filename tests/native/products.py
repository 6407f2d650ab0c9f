"""Ways for a matrix kernel to fail: multiplications that stand in for a kernel's own."""

from __future__ import annotations

import torch

from penstock.native.matrix_kernels import Product
from penstock.native.matrix_probe import Operands, multiply


def fails(product: Product, kernel: str, operands: Operands) -> torch.Tensor:
    """Multiply, but fail with any kernel other than torch's, as oneDNN does on a processor that it refuses."""
    if kernel != "torch":
        raise RuntimeError("needs the cpu support avx512bw\nframe #0: somewhere")
    return multiply(product, kernel, operands)


def in_bfloat16(product: Product, kernel: str, operands: Operands) -> torch.Tensor:
    """Multiply, but with operands rounded to bfloat16 in any kernel other than torch's."""
    if kernel == "torch":
        return multiply(product, kernel, operands)
    x, w, bias = (None if o is None else o.bfloat16().float() for o in operands)
    assert x is not None
    assert w is not None
    return multiply(product, "torch", (x, w, bias))


def gives_nan(product: Product, kernel: str, operands: Operands) -> torch.Tensor:
    """Multiply, but give NaN with any kernel other than torch's."""
    return multiply(product, "torch", operands) * (1.0 if kernel == "torch" else float("nan"))
