"""Positions that are true, and values that are different: how many there are follows from data.

Results are unsized outside of blocks (record/unsized.py); gradients go through what is gathered by them.
Source: fluid.layers.where, unique, unique_with_counts (Fluid 1.8), where_op.h, unique_op.h.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.record.arrays import append
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized, sized_in_block
from penstock.program.record.variable import dtype_named


@reads_unsized
def where(condition: Any) -> Any:
    """Return the positions that are true, int64 [n, dimensions of the condition], in the order of memory.

    Raises ProgramError for a condition that is not bool; torch.where(condition, x, y) chooses between two variables.
    """
    if condition.dtype != torch.bool or not condition.ndim:
        raise ProgramError(
            f"{user_line()}: where needs a condition of bool with a dimension; got {condition!r}. Compare it (x > 0), "
            "or use nonzero",
            variable=condition.name,
        )
    return _true(condition, "where")


@reads_unsized
def nonzero(input: Any, as_tuple: bool = False) -> Any:
    """Return the positions that are not zero, int64 [n, dimensions]; `as_tuple`: of each dimension, [n, 1]."""
    found = _true(input != 0 if input.dtype != torch.bool else input, "nonzero")
    return tuple(found[:, at : at + 1] for at in range(input.ndim)) if as_tuple else found


def _true(condition: Any, layer: str) -> Any:
    recording = recording_of(default_main_program())

    def build() -> Any:
        fake = empty_fake([recording.symbols.new_of_data(), condition.ndim], None, torch.int64)
        append(recording, "rows_true", (condition,), [fake])
        return recording.handle(fake)

    with name_scope(default_main_program().unique(layer)):
        return sized_in_block(recording, build)


def unique(x: Any, dtype: Any = "int32") -> tuple[Any, Any]:
    """Return the different values of x [n], in the order in which they come first, and where each of x is among them.

    Shapes: [m]; int [n] of `dtype`. Raises ProgramError for more dimensions.
    """
    values, places, _ = unique_with_counts(x, dtype)
    return values, places


@reads_unsized
def unique_with_counts(x: Any, dtype: Any = "int32") -> tuple[Any, Any, Any]:
    """Return what `unique` does, and how often each value is there, int [m]. Raises ProgramError."""
    kind = dtype_named(dtype)
    if x.ndim != 1 or kind not in (torch.int32, torch.int64):
        raise ProgramError(
            f"{user_line()}: unique needs x of one dimension, and positions of int32 or int64; got {x!r} and {dtype!r}",
            variable=x.name,
        )
    recording = recording_of(default_main_program())

    def build() -> Any:
        count = recording.symbols.new_of_data()
        fakes = [empty_fake([size], None, own) for size, own in ((count, x.dtype), (x.shape[0], kind), (count, kind))]
        append(recording, "rows_unique", (x, str(kind).removeprefix("torch.")), fakes)
        return tuple(recording.handle(fake) for fake in fakes)

    with name_scope(default_main_program().unique("unique")):
        values, places, counts = sized_in_block(recording, build)
        return values, places, counts
