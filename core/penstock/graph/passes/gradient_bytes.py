"""How large a dense gradient is."""

from __future__ import annotations

import math

from penstock.program.program import Program

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4}


def gradient_bytes(program: Program, name: str) -> int:
    """Return the bytes of a variable, 0 where they depend on the batch."""
    variable = program.variables[name]
    sizes = [d for d in variable.shape if isinstance(d, int)]
    return math.prod(sizes) * _ITEM_BYTES.get(variable.dtype, 8) if len(sizes) == len(variable.shape) else 0
