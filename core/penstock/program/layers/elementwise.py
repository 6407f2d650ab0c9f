"""Arithmetic: element by element with Fluid's broadcasting, products, reductions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.activations import activate
from penstock.program.program import Program
from penstock.program.record.alignment import is_whole
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared import written
from penstock.program.record.ragged import join_sizes
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.unsized import Unsized
from penstock.program.record.variable import Variable


def _elementwise(kind: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
        with name_scope(name or default_main_program().unique(kind)):
            return activate(function(x, _aligned(x, y, axis, kind)), act)

    call.__name__ = call.__qualname__ = kind
    call.__doc__ = f"{kind} of x and y; y's dimensions stand at `axis` of x (-1: at its end), others are repeated."
    return call


def _aligned(x: Any, y: Any, axis: int, kind: str) -> Any:
    if axis == -1 or x.ndim == y.ndim:
        return y
    behind = x.ndim - axis - y.ndim
    if axis < 0 or behind < 0:
        raise ProgramError(
            f"{user_line()}: {kind}: y with {y.ndim} dimensions does not fit x with {x.ndim} at axis {axis}"
        )
    return y.reshape([*y.shape, *[1] * behind])


def _quotient(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc") if is_whole(x) and is_whole(y) else torch.div(x, y)


elementwise_add = _elementwise("elementwise_add", torch.add)
elementwise_sub = _elementwise("elementwise_sub", torch.sub)
elementwise_mul = _elementwise("elementwise_mul", torch.mul)
elementwise_div = _elementwise("elementwise_div", _quotient)
elementwise_max = _elementwise("elementwise_max", torch.maximum)
elementwise_min = _elementwise("elementwise_min", torch.minimum)
elementwise_pow = _elementwise("elementwise_pow", torch.pow)
elementwise_mod = _elementwise("elementwise_mod", torch.remainder)
elementwise_floordiv = _elementwise("elementwise_floordiv", lambda x, y: torch.div(x, y, rounding_mode="floor"))


def matmul(
    x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, alpha: float = 1.0, name: str | None = None
) -> Any:
    """Return alpha * x y, over the last two dimensions."""
    with name_scope(name or default_main_program().unique("matmul")):
        left = x.transpose(-1, -2) if transpose_x and x.ndim > 1 else x
        right = y.transpose(-1, -2) if transpose_y and y.ndim > 1 else y
        if left.ndim > 1 and right.ndim > 1:  # what is multiplied has one size, also where both are known when fed
            join_sizes(left._recording, left.desc.shape[-1], right.desc.shape[-2])
        product: Any = torch.matmul(left, right)
        return product if alpha == 1.0 else product * alpha


def mul(x: Any, y: Any, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Any:
    """Return x y with x flattened to a matrix after `x_num_col_dims` dimensions and y after `y_num_col_dims`.

    Shape: x's first dimensions, then y's last ones.
    """
    with name_scope(name or default_main_program().unique("mul")):
        left = x if x.ndim == x_num_col_dims + 1 else x.flatten(x_num_col_dims)
        right = y.flatten(0, y_num_col_dims - 1) if y_num_col_dims > 1 else y
        right = right if right.ndim == 2 else right.flatten(1)
        product: Any = torch.matmul(left, right)
        return product if y.ndim == y_num_col_dims + 1 else product.unflatten(-1, y.shape[y_num_col_dims:])


def sqrt(x: Any, name: str | None = None) -> Any:
    """Return the square root."""
    return torch.sqrt(x)


def exp(x: Any, name: str | None = None) -> Any:
    """Return e ** x."""
    return torch.exp(x)


def log(x: Any, name: str | None = None) -> Any:
    """Return the natural logarithm."""
    return torch.log(x)


def abs(x: Any, name: str | None = None) -> Any:
    """Return |x|."""
    return torch.abs(x)


def square(x: Any, name: str | None = None) -> Any:
    """Return x * x."""
    return torch.square(x)


def pow(x: Any, factor: float = 1.0, name: str | None = None) -> Any:
    """Return x ** factor."""
    return torch.pow(x, factor)


def clip(x: Any, min: float, max: float, name: str | None = None) -> Any:
    """Return min(max(x, min), max) in the dtype of x; of whole numbers the bounds are cut to whole ones.

    The gradient is 0 at the bounds, too, as in Fluid; that of torch.clamp is 1.
    """
    if is_whole(x):
        bounds = ((min, -math.inf), (max, math.inf))
        least, most = (None if _is_number(bound, none) else _whole_number(x, bound) for bound, none in bounds)
        return x.clone() if least is most is None else torch.clamp(x, least, most)
    return F.hardtanh(x, min, max) if x.dtype.is_floating_point else torch.clamp(x, min, max)


def scale(
    x: Any,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Return scale * x + bias, or scale * (x + bias), in the dtype of x.

    Of whole numbers the factor and the bias are cut to whole ones first, as in Fluid's kernel: 2.5 doubles int64.
    `scale` is a number or a variable of one element, in any dtype. Shape: that of x.
    """
    with name_scope(name or default_main_program().unique("scale")):
        factor, shift = (_whole_number(x, number) if is_whole(x) else number for number in (scale, bias))
        return activate(x * factor + shift if bias_after_scale else (x + shift) * factor, act)


def _whole_number(like: Any, number: Any) -> Any:
    """A factor as a whole number: one of Python or NumPy without its fraction, a variable in the dtype of `like`.

    A size, such as the batch, stays one: as a number it would be that of the program's first batch.
    """
    if isinstance(number, torch.SymInt):
        return number
    return number.to(like.dtype) if hasattr(number, "to") else int(number)


def _is_number(operand: Any, number: float) -> bool:
    return isinstance(operand, numbers.Real) and operand == number


def sum(x: Any) -> Any:
    """Return the elementwise sum of a list of variables; of a single one a copy."""
    parts = list(x) if isinstance(x, (list, tuple)) else [x]
    with name_scope(default_main_program().unique("sum")):
        total = parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]
        for part in parts[2:]:
            total = total + part
        return total


def sums(input: Sequence[Any], out: Any = None) -> Any:
    """Return the elementwise sum of a list of variables; with `out`, write it there and return `out`."""
    total = sum(input)
    return total if out is None else written(out, total)


_LEAST_SQUARE = 1e-8  # of the length of a row, in Fluid's kernel


def cos_sim(X: Any, Y: Any) -> Any:
    """Return the cosine of the angle between rows, named as in Fluid, `cos_sim_0.tmp_0`, since scripts fetch it so.

    The square of a length is 1e-8 at least: of a row of zeros it is 0. Shapes: X [n, d]; Y [n, d] or [1, d]; result
    [n, 1].
    """
    prefix = default_main_program().unique("cos_sim")
    with name_scope(prefix):
        squares = [(one * one).sum(1, keepdim=True).clamp(min=_LEAST_SQUARE) for one in (X, Y)]
        lengths = squares[0].sqrt() * squares[1].sqrt()
        made = (X * Y).sum(1, keepdim=True) / lengths
        if isinstance(made, Variable) and not isinstance(made, Unsized):
            rename_recorded(made._recording, made.fake, _free_result(made._recording.program, prefix))
        return made


def _free_result(program: Program, prefix: str) -> str:
    """`cos_sim_0.tmp_0`, or the next one that is free: `unique_name.guard` counts anew."""
    while f"{prefix}.tmp_0" in program.variables:
        prefix = program.unique("cos_sim")
    return f"{prefix}.tmp_0"


Dims = int | Sequence[int] | None


def mean(x: Any, name: str | None = None) -> Any:
    """Return the mean of all elements."""
    with name_scope(name or default_main_program().unique("mean")):
        return x.mean()


def _dims(x: Any, dim: Dims) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def reduce_sum(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the sum over `dim`, or over all elements, in the dtype of input, where torch's sum of int32 is int64."""
    with name_scope(name or default_main_program().unique("reduce_sum")):
        return _sum_over(input, dim, keep_dim, **_kept(input))


def _kept(input: Any) -> dict[str, torch.dtype]:
    """What keeps torch's sums and products of whole numbers in their dtype."""
    return {"dtype": input.dtype} if is_whole(input) else {}


def _sum_over(input: Any, dim: Dims, keep_dim: bool, **kept: torch.dtype) -> Any:
    return input.sum(**kept) if dim is None else input.sum(dim, keepdim=keep_dim, **kept)


def reduce_mean(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the mean over `dim`, or over all elements, in the dtype of input: of whole numbers cut to a whole one."""
    with name_scope(name or default_main_program().unique("reduce_mean")):
        if is_whole(input):
            total, count = (_sum_over(one, dim, keep_dim) for one in (input, torch.ones_like(input)))
            return _quotient(total, count).to(input.dtype)
        return input.mean() if dim is None else input.mean(dim, keepdim=keep_dim)


def reduce_max(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the maximum over `dim`, or over all elements; equal maxima share the gradient."""
    with name_scope(name or default_main_program().unique("reduce_max")):
        return torch.amax(input, _dims(input, dim), keep_dim)


def reduce_min(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the minimum over `dim`, or over all elements; equal minima share the gradient."""
    with name_scope(name or default_main_program().unique("reduce_min")):
        return torch.amin(input, _dims(input, dim), keep_dim)


def reduce_prod(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the product over `dim`, or over all elements, in the dtype of input."""
    with name_scope(name or default_main_program().unique("reduce_prod")):
        # One dimension after another, the last first, so that positions stay what they are.
        for position in sorted((d % input.ndim for d in _dims(input, dim)), reverse=True):
            input = input.prod(position, keepdim=keep_dim, **_kept(input))
        return input
