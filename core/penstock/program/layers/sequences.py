"""Sequences of different length in one batch: their lengths as a variable, and layers that see a row's own steps only.

A sequence input is padded, [batch, time, …], and declared with lod_level=1; how many steps of each row are its own is
an input beside it, `<name>@LENGTHS` int64 [batch, 1], which data sets feed. A variable belongs to the input whose
time it has: its dimension 1 is the same symbol, so an embedding or a projection of words has the words' lengths.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.expr import Expr
from penstock.program.ir import VarDesc
from penstock.program.layers.inputs import fluid_data
from penstock.program.record.context import default_main_program
from penstock.program.record.source import user_line
from penstock.program.record.variable import record_call

LENGTHS = "@LENGTHS"
_POOLS = ("sum", "average", "mean", "sqrt", "max", "first", "last")


def sequence_lengths(input: Any) -> Any:
    """Return the variable int64 [batch, 1] of the true lengths of a sequence input, or of what was made of one.

    Raises ProgramError if `input` has no time of a sequence input.
    """
    program, name = default_main_program(), _owner(input).name + LENGTHS
    if name in program.variables:
        return program.handle(name)
    return fluid_data(name, [None, 1], "int64")


def sequence_pool(
    input: Any, pool_type: str, is_test: bool = False, pad_value: float = 0.0, lengths: Any = None
) -> Any:
    """Reduce each row's own steps to one: 'sum', 'average' (or 'mean'), 'sqrt' (sum / √length), 'max', 'first', 'last'.

    Shapes: input [n, t, …]; lengths int64 [n] or [n, 1], those of the sequence input if they are not given; result
    [n, …]. A row without steps becomes `pad_value`. Source: fluid.layers.sequence_pool.
    """
    kind = pool_type.lower()
    if kind not in _POOLS:
        raise ProgramError(f"{user_line()}: sequence_pool has no pool_type {pool_type!r}; expected one of {_POOLS}")
    if input.ndim < 2:
        raise ProgramError(
            f"{user_line()}: sequence_pool needs an input [batch, time, …]; got {input}", variable=input.name
        )
    if lengths is None:
        lengths = sequence_lengths(input)
    lengths = record_call(torch.ops.penstock.checked_lengths, (lengths, input.shape[1], "sequence_pool"), {})
    counts = lengths.reshape(-1, *[1] * (input.ndim - 1))
    steps = input.new_zeros(input.shape[1], dtype=torch.int64).add(1).cumsum(0) - 1
    outside = (steps.reshape(1, -1, *[1] * (input.ndim - 2)) >= counts).expand_as(input)
    pooled = _pooled(kind, input, counts, outside)
    return pooled.masked_fill((counts == 0).squeeze(1).expand_as(pooled), pad_value)


def _pooled(kind: str, x: Any, counts: Any, outside: Any) -> Any:
    if kind == "max":
        return x.masked_fill(outside, float("-inf")).amax(1)
    if kind == "first":
        return x[:, 0]
    if kind == "last":
        last = (counts - 1).clamp(min=0).expand(-1, 1, *x.shape[2:])
        return torch.gather(x, 1, last).squeeze(1)
    total = x.masked_fill(outside, 0.0).sum(1)
    if kind == "sum":
        return total
    divisor = counts.squeeze(1).clamp(min=1).to(total.dtype)
    return total / (divisor.sqrt() if kind == "sqrt" else divisor)


def _owner(variable: Any) -> VarDesc:
    """Return the sequence input whose time a variable has."""
    shape = variable.desc.shape
    time = shape[1] if len(shape) > 1 else None
    if isinstance(time, Expr):
        for known in default_main_program().feeds():
            if known.lod_level >= 1 and len(known.shape) > 1 and known.shape[1] == time:
                return known
    raise ProgramError(
        f"{user_line()}: {variable} has no time of a sequence input, so its lengths are not known. Declare the input "
        f"as fluid.layers.data(name, shape=[-1, -1], dtype='int64', lod_level=1), or pass lengths=…{_without_time()}",
        variable=variable.name,
    )


def _without_time() -> str:
    """Return a sentence about inputs that are declared as Fluid's sequences, [-1, 1], if there are any."""
    names = [v.name for v in default_main_program().feeds() if v.lod_level and list(v.shape[1:]) == [1]]
    if not names:
        return ""
    return f". The shape [-1, 1] of {', '.join(map(repr, names))} is one value a row, whatever the lod_level"


__all__ = ["LENGTHS", "sequence_lengths", "sequence_pool"]
