"""What an operator of Variables (`x * mask`) means: in a module or a captured loss what it does in torch, else what it
does in Fluid, where operands that have the batch begin together, and `x += y` makes another variable.

Source: python/paddle/fluid/layers/math_op_patch.py (Fluid 1.8), which gives the operator axis=0 there.
"""

from __future__ import annotations

from typing import Any

from penstock.program.expr import Dim, Expr
from penstock.program.record.source import running_module

_ALIGNED = frozenset(["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "iadd", "isub", "imul", "itruediv"])
_WRITING = frozenset(["__iadd__", "__isub__", "__imul__", "__itruediv__"])
_ALIGNED |= frozenset(["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"])


def maker_of(name: str) -> str:
    """Return the operator that makes what another one (`__iadd__`) writes; the same for one that makes something."""
    return f"__{name.removeprefix('__i')}" if name in _WRITING else name


def follows_fluid(recording: Any) -> bool:
    """Whether operators that are recorded now have Fluid's meaning."""
    return bool(recording.aligns) and running_module() is None


def is_aligned(name: str) -> bool:
    """Whether an operator (`__radd__`) aligns its operands."""
    return {name.strip("_"), name.strip("_").removeprefix("r")} & _ALIGNED != set()


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
