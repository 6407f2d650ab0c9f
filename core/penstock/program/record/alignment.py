"""How the operands of an operator of Variables (`x * mask`) lie to one another: as in Fluid where a batch is first.

Source: python/paddle/fluid/layers/math_op_patch.py (Fluid 1.8), which gives the operator axis=0 there.
"""

from __future__ import annotations

from typing import Any

from penstock.program.expr import Expr
from penstock.program.record.source import running_module

_ALIGNED = frozenset(["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge"])


def is_aligned(name: str) -> bool:
    """Whether an operator (`__radd__`) aligns its operands."""
    return {name.strip("_"), name.strip("_").removeprefix("r")} & _ALIGNED != set()


def aligned(left: Any, right: Any) -> tuple[Any, Any]:
    """Return the operands of an operator, of which one may have new dimensions of 1 at its end.

    Where the one of fewer dimensions begins with a size that a run knows, and the other begins with its sizes, they
    begin together, as in Fluid; else, and in a module or a captured loss, they end together, as in torch.
    """
    few, many = (left, right) if left.ndim < right.ndim else (right, left)
    if few.ndim in (0, many.ndim) or type(left).lifted or type(right).lifted:
        return left, right
    own, others = few.desc.shape, many.desc.shape
    if not own or not isinstance(own[0], Expr) or any(d not in (1, e) for d, e in zip(own, others, strict=False)):
        return left, right
    if running_module() is not None or not many._recording.aligns:
        return left, right
    wide: Any = few
    for _ in range(many.ndim - few.ndim):
        wide = wide.unsqueeze(-1)
    return (wide, right) if few is left else (left, wide)
