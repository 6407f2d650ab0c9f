"""Products of vectors, matrices and tensors, and what is found along diagonals, under Fluid 1.8's names and defaults.

A result of one element has no dimensions; a fetch gives it as [1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.layers.activations import activate
from penstock.program.layers.expected import expect_known, expect_rank, refuse
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared import written
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter


def _result(found: Any, out: Any) -> Any:
    return found if out is None else written(out, found)


def bmm(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the matrix product of each pair. Shapes: x [n, a, b], y [n, b, c]; result [n, a, c]."""
    for operand in (x, y):
        expect_rank("bmm", operand, 3)
    return torch.bmm(x, y)


def dot(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the inner product of each pair of vectors. Shapes: [.., d]; result [.., 1]."""
    for operand in (x, y):
        expect_rank("dot", operand, 1, 2)
    return (x * y).sum(-1, keepdim=True)


def addmm(input: Any, x: Any, y: Any, alpha: float = 1.0, beta: float = 1.0, name: str | None = None) -> Any:
    """Return beta * input + alpha * x y. Shapes: x [a, b], y [b, c]; input [a, c], or with 1 for a size."""
    for operand in (x, y):
        expect_rank("addmm", operand, 2)
    return torch.addmm(input, x, y, beta=beta, alpha=alpha)


def addcmul(
    input: Any, tensor1: Any, tensor2: Any, value: float = 1.0, out: Any = None, name: str | None = None
) -> Any:
    """Return input + value * tensor1 * tensor2, element by element; with `out`, write it there and return `out`."""
    return _result(input + tensor1 * tensor2 * value, out)


def cross(input: Any, other: Any, dim: int | None = None) -> Any:
    """Return the cross products along `dim`, of size 3; by default, and for 0, along the first that has this size."""
    axis = dim or next((i for i, size in enumerate(input.desc.shape) if size == 3), None)
    if axis is None or input.desc.shape[axis] != 3:
        refuse("cross", f"size 3 along dim={dim}", input, "Give the dimension of the vectors' three elements")
    return torch.linalg.cross(input, other, dim=axis)


def dist(x: Any, y: Any, p: float = 2) -> Any:
    """Return the p-norm of x - y, whose shapes broadcast; p may be 0 (how many differ) or infinite."""
    return torch.dist(x, y, float(p))


def t(input: Any, name: str | None = None) -> Any:
    """Return a matrix with rows and columns exchanged; what has fewer than two dimensions as it is."""
    if input.ndim > 2:
        refuse("t", "at most two dimensions", input, "Use layers.transpose(x, perm)")
    return input.t()


def trace(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1, out: Any = None, name: str | None = None) -> Any:
    """Return the sum of the diagonal over `dim1` and `dim2` that is `offset` above the main one."""
    if input.ndim < 2 or dim1 % input.ndim == dim2 % input.ndim:
        refuse("trace", f"two dimensions, dim1={dim1} and dim2={dim2}", input, "Give two different dimensions")
    matrices = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    row = input.new_ones([rows, 1], dtype=torch.int64).cumsum(0)
    column = input.new_ones([1, columns], dtype=torch.int64).cumsum(1)
    chosen = torch.where(column - row == offset, matrices, torch.zeros_like(matrices))
    return _result(chosen.sum((-2, -1)), out)


def kron(x: Any, y: Any, out: Any = None, name: str | None = None) -> Any:
    """Return Kronecker's product: each element of x times all of y. Sizes are the products of theirs."""
    rank = max(x.ndim, y.ndim)
    left, right = ([*[1] * (rank - v.ndim), *v.shape] for v in (x, y))
    spread = x.reshape([size for pair in left for size in (pair, 1)])
    filled = y.reshape([size for pair in right for size in (1, pair)])
    return _result((spread * filled).reshape([a * b for a, b in zip(left, right, strict=True)]), out)


def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Return matrices over the new dimensions `dim1` and `dim2` whose diagonals are the last dimension of `input`."""
    return torch.diag_embed(input, offset, dim1, dim2)


def logsumexp(
    x: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False, out: Any = None, name: str | None = None
) -> Any:
    """Return log of the sum of exp(x) over `dim` (all), without overflow of exp."""
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return _result(torch.logsumexp(x, dims, keepdim=keepdim), out)


def allclose(
    input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False, name: str | None = None
) -> Any:
    """Return one bool: whether |input - other| <= atol + rtol |other| everywhere."""
    return torch.isclose(input, other, rtol, atol, equal_nan).all()


def elementwise_equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x == y as bool, element by element."""
    return torch.eq(x, y)


def bilinear_tensor_product(
    x: Any,
    y: Any,
    size: int,
    act: str | None = None,
    name: str | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
) -> Any:
    """Return x_n W_k y_n for each k, with a bias. Shapes: x [n, a], y [n, b], W [size, a, b], bias [1, size];
    result [n, size]."""
    prefix = name or default_main_program().unique("bilinear_tensor_product")
    for operand in (x, y):
        expect_rank("bilinear_tensor_product", operand, 2)
    shape = [size, expect_known("bilinear_tensor_product", x, 1), expect_known("bilinear_tensor_product", y, 1)]
    wanted, bias_attr, dtype = ParamAttr.of(param_attr), ParamAttr.of(bias_attr), x.desc.dtype
    if wanted is None:
        raise ProgramError(f"{user_line()}: {prefix}: param_attr=False: it has no meaning without its weight")
    with name_scope(prefix):
        weight: Any = create_parameter(shape, dtype, wanted, prefix=prefix, suffix="w_0")
        made: Any = torch.einsum("na,kab,nb->nk", x, weight, y)
        if bias_attr is not None:
            made = made + create_parameter([1, size], dtype, bias_attr, Constant(0.0), prefix=prefix, suffix="b_0")
        return activate(made, act)


def fsp_matrix(x: Any, y: Any) -> Any:
    """Return how channels go together, averaged over positions. Shapes: x [n, a, h, w], y [n, b, h, w]; result
    [n, a, b]."""
    for operand in (x, y):
        expect_rank("fsp_matrix", operand, 4)
    left, right = x.flatten(2), y.flatten(2)
    return torch.bmm(left, right.transpose(1, 2)) / left.shape[2]
