"""`fluid.contrib.memory_usage`: what the variables that a Program makes take together, for a size of the batch.

A rough estimate, as Fluid's: every variable counts once, none is released before the end. What an executor really
needs is in docs/memory.md. Torch-free.  Source: contrib/memory_usage_calc.py (Fluid 1.8).
"""

from __future__ import annotations

import math

from penstock.errors import SpecError
from penstock.program.expr import evaluate
from penstock.program.program import Program

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int16": 2, "int32": 4, "int64": 8}
"""Of one element; of other dtypes 1."""


def memory_usage(program: Program, batch_size: int) -> tuple[float, float, str]:
    """Return (1.05 times, 1.1 times the bytes, their unit): of all that operators make; 'B', 'KB' or 'MB'.

    Every size that is not known before a run counts as the batch. Raises SpecError for what is no Program, or a batch
    below 1.
    """
    if not isinstance(program, Program):
        raise SpecError(f"memory_usage: program is a {type(program).__name__}; expected a Program")
    if batch_size <= 0:
        raise SpecError(f"memory_usage: batch_size is {batch_size}; expected 1 or more")
    total = 0.0
    for name in dict.fromkeys(name for op in program.operators for name in op.output_names()):
        var = program.variables[name]
        symbols = {symbol: batch_size for size in var.shape if not isinstance(size, int) for symbol in size.symbols()}
        total += _BYTES.get(var.dtype, 1) * math.prod(evaluate(size, symbols) for size in var.shape)
    unit = "B"
    for larger in ("KB", "MB"):
        if total > 1024:
            total, unit = total / 1024, larger
    return total * 1.05, total * 1.1, unit
