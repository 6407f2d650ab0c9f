"""Which kernels multiply matrices correctly on this processor with this torch: probed once, before one is measured.

A kernel other than torch's is used only if a small product of each layout that it is meant for succeeds and equals
torch's within rounding. A kernel that fails is left out of the choice; it never ends a job.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.machine.capability import Absent, Capability, capability, note, probe
from penstock.native.fused_ops import mkl_vendor_check
from penstock.native.matrix_kernels import KERNELS, Product

GROUP = "matrix"
ROUNDINGS = 32.0
"""Allowed difference from torch's product, in units of the rounding error of |row| x |column|.

The sum of k products of random signs has an error near one such unit in either kernel. One that multiplies in TF32 or
bfloat16 is some 2^12 or 2^15 units of one product off, hence sqrt(k) less in these: noticed up to k of some thousands.
"""
_TRIED = {
    "onednn": (
        Product(33, 48, 20, bias=True, activation="relu"),
        Product(33, 48, 20, transpose_w=True),
        Product(33, 48, 20, transpose_x=True),
        Product(64, 48, 2, transpose_x=True),
    ),
    "onednn_matmul": (
        Product(33, 48, 20, transpose_x=True),
        Product(33, 48, 20, transpose_x=True, transpose_w=True),
        Product(33, 48, 20, batch=3),
        Product(33, 48, 20, transpose_w=True, batch=3),
    ),
}

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Multiply = Callable[[Product, str, Operands], torch.Tensor]


def operands_of(product: Product, seed: int) -> Operands:
    """Return x, w and the bias, float32 on CPU, random, in the layout that the product describes."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:  # whatever torch's default dtype and device are
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")

    batch = [product.batch] if product.batch else []
    x = [product.k, product.m] if product.transpose_x else [product.m, product.k]
    w = [product.n, product.k] if product.transpose_w else [product.k, product.n]
    bias = random(product.n) if product.bias else None
    return random(*batch, *x), random(*batch, *w), bias


def multiply(product: Product, kernel: str, operands: Operands) -> torch.Tensor:
    """Return the product by one kernel. Raises what the kernel raises; there is no fallback."""
    x, w, bias = operands
    result: torch.Tensor = torch.ops.penstock.product_by(
        x, w, bias, product.transpose_x, product.transpose_w, product.activation, kernel
    )
    return result


def why_wrong(product: Product, kernel: str, operands: Operands, by: Multiply | None = None) -> str:
    """Describe how a kernel's result differs from torch's beyond rounding, or why it fails; '' if it is right.

    Cost: two products and one of the rows' and columns' lengths.
    """
    try:
        mine = (by or multiply)(product, kernel, operands)
    except Exception as error:  # noqa: BLE001  # the answer: whatever it meets, the kernel is left out
        return (str(error) or type(error).__name__).partition("\n")[0]  # torch adds its frames
    theirs = multiply(product, "torch", operands)
    if mine.shape != theirs.shape:
        return f"gives shape {tuple(mine.shape)} where torch's gives {tuple(theirs.shape)}"
    unit = torch.finfo(torch.float32).eps * ROUNDINGS
    off = (mine - theirs).abs() - unit * (_lengths(product, operands) + theirs.abs())
    worst = float(off.max())
    return "" if worst <= 0 else f"differs from torch's by {worst:.2g} more than rounding"  # NaN is no match either


def available() -> tuple[str, ...]:
    """Return the kernels that may be chosen here; torch's is always one. Probes once for the process."""
    return tuple(kernel for kernel in KERNELS if kernel == "torch" or capability(f"{GROUP}.{kernel}").present)


def report() -> tuple[Capability, ...]:
    """Return what was found of the kernels and of what else in torch's libraries changes their speed."""
    names = [f"{GROUP}.{kernel}" for kernel in KERNELS if kernel != "torch"]
    return tuple(capability(name) for name in (*names, "threads.openmp", "threads.mkl", "matrix.mkl_vendor"))


def _tried(kernel: str) -> str:
    for seed, product in enumerate(_TRIED[kernel]):
        why = why_wrong(product, kernel, operands_of(product, seed))
        if why:
            raise Absent(why)
    return f"multiplies as torch's does ({len(_TRIED[kernel])} layouts tried)"


@probe(f"{GROUP}.onednn", fallback="torch's matrix kernel")
def _onednn() -> str:
    return _tried("onednn")


@probe(f"{GROUP}.onednn_matmul", fallback="the kernel onednn, torch's for batches")
def _onednn_matmul() -> str:
    return _tried("onednn_matmul")


@note(f"{GROUP}.mkl_vendor", meaning="MKL runs as it decides itself")
def _mkl_vendor() -> str:
    answer = mkl_vendor_check()
    if answer == "absent":
        raise Absent("this process has no mkl_serv_intel_cpu_true")
    return f"MKL takes the processor for its vendor's: {answer}"


def _lengths(product: Product, operands: Operands) -> torch.Tensor:
    """|row of x| x |column of w|, [m, n] or [batch, m, n]."""
    x, w, bias = operands
    rows: torch.Tensor = torch.linalg.vector_norm(x, dim=-2 if product.transpose_x else -1)
    columns: torch.Tensor = torch.linalg.vector_norm(w, dim=-1 if product.transpose_w else -2)
    lengths = rows.unsqueeze(-1) * columns.unsqueeze(-2)
    return lengths if bias is None else lengths + bias.abs()
