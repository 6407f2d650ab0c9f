"""What an operator of Variables (`x * mask`) means: in a module or a captured loss what it does in torch, else what it
does in Fluid, where operands that have the batch begin together, `x += y` makes another variable, and the quotient of
whole numbers is one.

Source: python/paddle/fluid/layers/math_op_patch.py (Fluid 1.8), which gives the operator axis=0 there;
elementwise_div_op.h, which divides in the type of the operands.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.program.expr import Dim, Expr
from penstock.program.record.source import running_module

_ALIGNED = frozenset(["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "iadd", "isub", "imul", "itruediv"])
_WHOLE = frozenset([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
_WRITING = frozenset(["__iadd__", "__isub__", "__imul__", "__itruediv__"])
_ALIGNED |= frozenset(["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"])


def maker_of(name: str) -> str:
    """Return the operator that makes what another one (`__iadd__`) writes; the same for one that makes something."""
    return f"__{name.removeprefix('__i')}" if name in _WRITING else name


def follows_fluid(recording: Any) -> bool:
    """Whether operators that are recorded now have Fluid's meaning."""
    return bool(recording.aligns) and running_module() is None


def is_whole(operand: Any) -> bool:
    """Whether it is a variable of whole numbers, or one number without a fraction: a float, too, as in Fluid."""
    if isinstance(operand, numbers.Real) and not isinstance(operand, bool):
        return float(operand).is_integer()
    return getattr(operand, "dtype", None) in _WHOLE


def divides_whole(name: str, operands: Sequence[Any]) -> bool:
    """Whether an operator is a quotient of whole numbers."""
    return maker_of(name) in ("__truediv__", "__rtruediv__") and all(map(is_whole, operands))


def whole_quotient(name: str, operands: Sequence[Any], call: Callable[..., Any]) -> Any:
    """Record a quotient of whole numbers by `call(function, operands, keywords)`, rounded towards zero.

    One of the operands may be a number, the variable's operand on its right, or, of `__rtruediv__`, on its left.
    """
    left, right = (
        operand if hasattr(operand, "fake") else int(operand)
        for operand in (reversed(operands) if name == "__rtruediv__" else operands)
    )
    dividend = call(torch.full_like, (right, left), {}) if isinstance(left, int) else left
    return call(torch.div, (dividend, right), {"rounding_mode": "trunc"})


def is_aligned(name: str) -> bool:
    """Whether an operator (`__radd__`) aligns its operands."""
    return {name.strip("_"), name.strip("_").removeprefix("r")} & _ALIGNED != set()


def operands_of(name: str, operand: Any, others: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of an operator of a variable: two variables aligned, if it aligns them."""
    is_pair = is_aligned(name) and hasattr(others[0], "fake")
    return aligned(operand, others[0]) if is_pair else (operand, *others)


def aligned(left: Any, right: Any) -> tuple[Any, Any]:
    """Return the operands of an operator, of which one may have new dimensions of 1 at its end.

    Where the one of fewer dimensions begins with a size that a run knows, and the other begins with its sizes (or with
    one that follows from data), they begin together, as in Fluid; else, and in a module or a captured loss, they end
    together, as in torch.
    """
    few, many = (left, right) if left.ndim < right.ndim else (right, left)
    if few.ndim in (0, many.ndim) or not hasattr(few, "desc") or not hasattr(many, "desc"):
        return left, right
    own, others = few.desc.shape, many.desc.shape
    if not _is_batch_of(many, own, others) or any(d not in (1, e) for d, e in zip(own[1:], others[1:], strict=False)):
        return left, right
    if not follows_fluid(many._recording):
        return left, right
    wide: Any = few
    for _ in range(many.ndim - few.ndim):
        wide = wide.unsqueeze(-1)
    return (wide, right) if few is left else (left, wide)


def _is_batch_of(many: Any, own: tuple[Dim, ...], others: tuple[Dim, ...]) -> bool:
    """Whether both begin with the same size, or with one of which data decides whether it is.

    One dimension of a size that follows from data, as of `arange`, is no batch: only what has others in common.
    """
    if not own or not isinstance(own[0], Expr) or not isinstance(others[0], Expr):
        return False
    of_data = many._recording.symbols.of_data
    follow = [size.op == "sym" and str(size.args[0]) in of_data for size in (own[0], others[0])]
    return own[0] == others[0] or (len(own) > 1 and any(follow))
