"""From an Operator to the torch call that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import OperatorError, ProgramError
from penstock.native import ops as _registered  # noqa: F401 - registers the operators, their shapes and derivatives
from penstock.program.expr import Expr
from penstock.program.ir import Arg, Operator, Ref, TorchConst

CAPTURED = "penstock.captured"
_NAMESPACES = {"aten", "penstock", "mkldnn", "_c10d_functional"}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
}


def resolve(op: Operator) -> Any:
    """Return the torch operator overload. Raises ProgramError for a type that this installation does not know."""
    parts = op.type.split(".")
    if len(parts) != 3 or parts[0] not in _NAMESPACES:
        raise ProgramError(
            f"operator {op.name!r} has the type {op.type!r}; expected namespace.name.overload", operator=op.name
        )
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError:
        raise ProgramError(
            f"operator {op.name!r}: {op.type!r} is unknown to torch {torch.__version__}", operator=op.name
        ) from None


def constant(value: TorchConst) -> Any:
    """Return the torch object of a constant."""
    match value.kind:
        case "dtype":
            return getattr(torch, value.value)
        case "device":
            return torch.device(value.value)
        case "layout":
            return _LAYOUTS[value.value]
        case "memory_format":
            return _FORMATS[value.value]


def concrete(value: Arg, bindings: Mapping[str, int], lookup: Callable[[str], Any]) -> Any:
    """Return an operand with symbols bound and variables looked up."""
    if isinstance(value, Ref):
        return lookup(value.name)
    if isinstance(value, Expr):
        return value.evaluate(bindings)
    if isinstance(value, tuple):
        return [concrete(v, bindings, lookup) for v in value]
    if isinstance(value, TorchConst):
        return constant(value)
    return value


def operator_error(op: Operator, message: str, shapes: Mapping[str, str], replica: int = 0) -> OperatorError:
    """Return the error for an operator that failed: what, where, on which shapes, and torch's own words."""
    operands = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no operands"
    where = f" on replica {replica}" if replica else ""
    first = message.strip().splitlines()[0] if message.strip() else "no message"
    return OperatorError(
        f"operator {op.name!r} ({op.type}), recorded at {op.source or 'an unknown line'}, failed{where}: {first}\n"
        f"  its operands: {operands}",
        operator=op.name,
        source=op.source,
        shapes=dict(shapes),
        replica=replica,
    )


def shape_text(value: Any) -> str:
    """Return 'float32[3, 4]' for a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
