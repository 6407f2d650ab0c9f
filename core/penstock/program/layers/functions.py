"""Functions of single elements, comparisons and logic, under Fluid 1.8's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ArgumentError, ProgramError
from penstock.program.layers.elementwise import clip
from penstock.program.record.declared import written
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable


def _unary(kind: str, function: Callable[[Any], Any], formula: str) -> Callable[..., Any]:
    def call(x: Any, name: str | None = None) -> Any:
        return function(x)

    call.__name__ = call.__qualname__ = kind
    call.__doc__ = f"Return {formula}, element by element."
    return call


sin = _unary("sin", torch.sin, "sin x")
cos = _unary("cos", torch.cos, "cos x")
asin = _unary("asin", torch.asin, "arcsin x")
acos = _unary("acos", torch.acos, "arccos x")
atan = _unary("atan", torch.atan, "arctan x")
ceil = _unary("ceil", torch.ceil, "the smallest whole number that is at least x")
floor = _unary("floor", torch.floor, "the largest whole number that is at most x")
round = _unary("round", torch.round, "the nearest whole number")
sign = _unary("sign", torch.sign, "-1, 0 or 1")
reciprocal = _unary("reciprocal", torch.reciprocal, "1 / x")
rsqrt = _unary("rsqrt", torch.rsqrt, "1 / sqrt(x)")
erf = _unary("erf", torch.erf, "the error function")
softplus = _unary("softplus", F.softplus, "log(1 + exp(x))")
softsign = _unary("softsign", F.softsign, "x / (1 + |x|)")
logsigmoid = _unary("logsigmoid", F.logsigmoid, "log(1 / (1 + exp(-x)))")
tanh_shrink = _unary("tanh_shrink", F.tanhshrink, "x - tanh x")


def softshrink(x: Any, alpha: float | None = None) -> Any:
    """Return x - alpha where x > alpha, x + alpha where x < -alpha, else 0; alpha: 0.5."""
    return F.softshrink(x, 0.5 if alpha is None else alpha)


def hard_shrink(x: Any, threshold: float | None = None) -> Any:
    """Return x where |x| > threshold, else 0; threshold: 0.5."""
    return F.hardshrink(x, 0.5 if threshold is None else threshold)


def thresholded_relu(x: Any, threshold: float | None = None) -> Any:
    """Return x where x > threshold, else 0; threshold: 1."""
    return F.threshold(x, 1.0 if threshold is None else threshold, 0.0)


def relu6(x: Any, threshold: float = 6.0, name: str | None = None) -> Any:
    """Return min(max(x, 0), threshold)."""
    return clip(x, 0.0, threshold)


def brelu(x: Any, t_min: float = 0.0, t_max: float = 24.0, name: str | None = None) -> Any:
    """Return min(max(x, t_min), t_max)."""
    return clip(x, t_min, t_max)


def soft_relu(x: Any, threshold: float = 40.0, name: str | None = None) -> Any:
    """Return log(1 + exp(min(max(x, -threshold), threshold)))."""
    return torch.log1p(torch.exp(torch.clamp(x, -threshold, threshold)))


def stanh(x: Any, scale_a: float = 0.67, scale_b: float = 1.7159, name: str | None = None) -> Any:
    """Return scale_b tanh(scale_a x)."""
    return scale_b * torch.tanh(scale_a * x)


def hard_swish(x: Any, threshold: float = 6.0, scale: float = 6.0, offset: float = 3.0, name: str | None = None) -> Any:
    """Return x min(max(x + offset, 0), threshold) / scale."""
    return x * torch.clamp(x + offset, 0.0, threshold) / scale


def selu(x: Any, scale: float | None = None, alpha: float | None = None, name: str | None = None) -> Any:
    """Return scale x where x > 0, else scale alpha (exp(x) - 1); by default with the constants of the paper."""
    scale = 1.0507009873554804934193349852946 if scale is None else scale
    alpha = 1.6732632423543772848170429916717 if alpha is None else alpha
    return scale * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0.0)))


def log1p(x: Any, out: Any = None, name: str | None = None) -> Any:
    """Return log(1 + x); with `out`, write it there and return `out`."""
    found: Any = torch.log1p(x)
    return found if out is None else written(out, found)


def clamp(input: Any, min: Any = None, max: Any = None, output: Any = None, name: str | None = None) -> Any:
    """Return input, at least `min` and at most `max`: numbers or variables, of which one may be None.

    With `output`, write it there and return `output`.
    """
    if min is None and max is None:
        raise ProgramError(f"{user_line()}: clamp: min and max are None; give one of them")
    found: Any = torch.clamp(input, min, max)
    return found if output is None else written(output, found)


def mish(x: Any, threshold: float = 20, name: str | None = None) -> Any:
    """Return x tanh(log(1 + exp(x))), the logarithm as x above `threshold` and as exp(x) below -threshold."""
    if threshold <= 0:
        raise ProgramError(f"{user_line()}: mish: threshold is {threshold}; expected a number above 0")
    grown = torch.where(x < -threshold, torch.exp(torch.clamp(x, max=0.0)), F.softplus(x, 1.0, threshold))
    return x * torch.tanh(grown)


def log_softmax(input: Any, axis: int | None = None, dtype: str | None = None, name: str | None = None) -> Any:
    """Return the logarithm of the softmax along `axis` (the last)."""
    x = input if dtype is None else input.astype(dtype)
    return F.log_softmax(x, -1 if axis is None else axis)


def cumsum(x: Any, axis: int | None = None, exclusive: bool | None = None, reverse: bool | None = None) -> Any:
    """Return sums of the elements up to each along `axis` (the last). `exclusive`: without the element itself.
    `reverse`: from the end."""
    dim = -1 if axis is None else axis
    running = torch.flip(torch.cumsum(torch.flip(x, [dim]), dim), [dim]) if reverse else torch.cumsum(x, dim)
    return running - x if exclusive else running


def _comparison(kind: str, function: Callable[[Any, Any], Any], sign: str) -> Callable[..., Any]:
    def call(x: Any, y: Any, force_cpu: bool | None = None, cond: Any = None) -> Any:
        found = function(x, y)
        return found if cond is None else written(cond, found)

    call.__name__ = call.__qualname__ = kind
    call.__doc__ = f"Return x {sign} y as bool; with `cond`, write it there and return `cond`."
    return call


less_than = _comparison("less_than", torch.lt, "<")
less_equal = _comparison("less_equal", torch.le, "<=")
greater_than = _comparison("greater_than", torch.gt, ">")
greater_equal = _comparison("greater_equal", torch.ge, ">=")
not_equal = _comparison("not_equal", torch.ne, "!=")


def equal(x: Any, y: Any, cond: Any = None) -> Any:
    """Return x == y as bool; with `cond`, write it there and return `cond`."""
    found = torch.eq(x, y)
    return found if cond is None else written(cond, found)


def is_empty(x: Any, cond: Any = None) -> Any:
    """Return whether x has no element, bool [1]; with `cond`, write it there and return `cond`."""
    elements = x.new_full([1], math.prod(x.shape), dtype=torch.int64)
    found = torch.eq(elements, 0)
    return found if cond is None else written(cond, found)


def _logic(kind: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(x: Any, y: Any, out: Any = None, name: str | None = None) -> Any:
        found = function(x, y)
        return found if out is None else written(out, found)

    call.__name__ = call.__qualname__ = kind
    call.__doc__ = f"Return {kind.removeprefix('logical_')} of two bools; with `out`, write it there and return `out`."
    return call


logical_and = _logic("logical_and", torch.logical_and)
logical_or = _logic("logical_or", torch.logical_or)
logical_xor = _logic("logical_xor", torch.logical_xor)


def logical_not(x: Any, out: Any = None, name: str | None = None) -> Any:
    """Return the opposite of a bool; with `out`, write it there and return `out`."""
    found: Any = torch.logical_not(x)
    return found if out is None else written(out, found)


Dims = int | Sequence[int] | None


def _reduced(x: Any, function: Callable[..., Any], dim: Dims, keep_dim: bool) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for position in sorted((d % x.ndim for d in dims), reverse=True):
        x = function(x, position, keepdim=keep_dim)
    return x


def reduce_all(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return whether all elements over `dim` (everywhere) are true."""
    return _reduced(input, torch.all, dim, keep_dim)


def reduce_any(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return whether an element over `dim` (everywhere) is true."""
    return _reduced(input, torch.any, dim, keep_dim)


def isfinite(x: Any) -> Any:
    """Return one bool: whether no element is infinite or NaN."""
    return torch.isfinite(x).all()


def has_inf(x: Any) -> Any:
    """Return one bool: whether an element is infinite."""
    return torch.isinf(x).any()


def has_nan(x: Any) -> Any:
    """Return one bool: whether an element is NaN."""
    return torch.isnan(x).any()


def increment(x: Any, value: float = 1.0, in_place: bool = True) -> Any:
    """Add a number to a variable, in place unless `in_place` is False, and return it."""
    _expect_variable("increment", x)
    amount = value if x.dtype.is_floating_point else int(value)
    if not in_place:
        return x + amount
    return written(x, x + amount) if not x.persistable else _added(x, amount)


def _expect_variable(what: str, value: object) -> None:
    if not isinstance(value, Variable):
        raise ArgumentError(f"{user_line()}: {what} needs a variable, got {value!r}")


def _added(x: Any, amount: float) -> Any:
    with torch.no_grad():
        x.add_(amount)
    return x
