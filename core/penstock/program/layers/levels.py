"""Other sequences for rows, and other rows for sequences: what follows from data, or is made of two levels.

How many rows a result has is known when it is run, so it is unsized outside of blocks (record/unsized.py).
Source: fluid.layers (Fluid 1.8), lod_reset_op.h, sequence_slice_op.h, sequence_expand_op.h, sequence_scatter_op.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.record.arrays import append
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.ragged import join_rows
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized, sized_in_block
from penstock.program.record.variable import Variable, record_call
from penstock.program.sequences import LENGTHS, lengths_of


@reads_unsized
def lod_reset(x: Any, y: Any = None, target_lod: Sequence[int] | None = None) -> Any:
    """Return the rows of x with the sequences of y, or with others.

    `y`: a variable with sequences, or one with the offsets of sequences, int [n + 1]; else `target_lod`: the offsets,
    as [0, 2, 3] for lengths 2 and 1. Raises ProgramError without either.
    """
    with name_scope(default_main_program().unique("lod_reset")):
        if y is not None and _levels(y):
            same = x.desc.shape[0] == y.desc.shape[0]
            return x if same else record_call(torch.ops.penstock.expect_rows, (x, y.shape[0]), {})
        return _with_levels(x, [_lengths_between(x, "lod_reset", target_lod if y is None else y)])


@reads_unsized
def lod_append(x: Any, level: Any) -> Any:
    """Return the rows of x with one more level of sequences within those that it has.

    `level`: the offsets of its sequences, numbers or a variable int [n + 1], or a variable that has sequences.
    """
    with name_scope(default_main_program().unique("lod_append")):
        inner = _levels(level)[-1] if isinstance(level, Variable) and _levels(level) else None
        own = _lengths_between(x, "lod_append", level) if inner is None else inner
        return _with_levels(x, [*_levels(x), own])


def _levels(x: Any) -> list[Any]:
    program = default_main_program()
    return [program.handle(name) for name in (lengths_of(program, x.desc.shape[0]) if x.desc.shape else [])]


def _lengths_between(like: Any, layer: str, offsets: Any) -> Any:
    """The lengths int64 [n, 1] between offsets. Raises ProgramError for numbers that are none."""
    if isinstance(offsets, Variable):
        whole: Any = offsets.reshape([-1]).to(torch.int64)
        return (whole[1:] - whole[:-1]).unsqueeze(1)
    given = [] if offsets is None else [int(one) for one in offsets]
    lengths = [end - begin for begin, end in pairwise(given)]
    if not lengths or given[0] or min(lengths) < 0:
        raise ProgramError(
            f"{user_line()}: {layer} needs a variable with sequences, or offsets that begin with 0 and do not fall; "
            f"got {offsets!r}"
        )
    return torch.cat([like.new_full([1, 1], one, dtype=torch.int64) for one in lengths])


def _with_levels(x: Any, levels: Sequence[Any]) -> Any:
    """The rows of x with sequences, lengths int64 [n, 1] of each level, outermost first."""
    recording = recording_of(default_main_program())

    def build() -> Any:
        inner = levels[-1]
        made = _rows_of(recording, x, inner)
        own = [_rows_of(recording, one, outer) for outer, one in pairwise(levels)]
        return give_levels(recording, made, [levels[0].clone(), *own])

    return sized_in_block(recording, build)


def _rows_of(recording: Recording, x: Any, lengths: Any) -> Any:
    """The rows of x, in a block, as rows of sequences with these lengths."""
    fake = empty_fake([recording.symbols.new_of_data(), *x.shape[1:]], None, x.dtype)
    append(recording, "rows_with_lengths", (x, lengths), [fake])
    return recording.handle(fake)


def give_levels(recording: Recording, x: Any, levels: Sequence[Any]) -> Any:
    """Let rows that a block has just made be those of sequences; lengths of each level, just made for them."""
    name, variables = x.name, recording.program.variables
    for number, level in enumerate(reversed(levels)):
        rename_recorded(recording, level.fake, name + LENGTHS)
        variables[name] = replace(variables[name], lod_level=len(levels) - number)
        name += LENGTHS
    return x


@reads_unsized
def sequence_slice(input: Any, offset: Any, length: Any, name: str | None = None) -> Any:
    """Return of each sequence `length` rows from `offset` on.

    Shapes: input ragged [rows, …]; offset, length int [n, 1]. A slice beyond the end of its sequence is an
    OperatorError of the run.
    """
    with name_scope(name or default_main_program().unique("sequence_slice")):
        own = _expect_one_level("sequence_slice", input)
        ends = own.cumsum(0)
        starts, counts = ends - own + offset.reshape([-1, 1]).to(torch.int64), length.reshape([-1, 1]).to(torch.int64)
        return picked_rows(input, starts, counts, ends)


def _expect_one_level(layer: str, x: Any) -> Any:
    levels = _levels(x)
    if len(levels) != 1:
        raise ProgramError(
            f"{user_line()}: {layer} needs ragged rows of one level; {x!r} has {len(levels)}. Declare the input as "
            "fluid.layers.data(name, shape=[1], dtype='int64', lod_level=1)",
            variable=x.name,
        )
    return levels[0]


def picked_rows(x: Any, starts: Any, counts: Any, ends: Any) -> Any:
    """Return the rows of x between starts and starts + counts, as sequences. `ends`: beyond which none may be."""
    recording = recording_of(default_main_program())

    def build() -> Any:
        fake = empty_fake([recording.symbols.new_of_data()], None, torch.int64)
        append(recording, "rows_between", (starts, counts, ends), [fake])
        rows = x.index_select(0, recording.handle(fake))
        return give_levels(recording, rows, [counts.clone()])

    return sized_in_block(recording, build)


def repeat_sequences(x: Any, counts: Any) -> Any:
    """Return sequence i of x as often as counts[i] says, int64 [n, 1]: ragged, with each copy a sequence."""
    recording = recording_of(default_main_program())
    own = _expect_one_level("sequence_expand", x)

    def build() -> Any:
        ends, size = own.cumsum(0), recording.symbols.new_of_data()
        parts = [empty_fake([size, 1], None, torch.int64) for _ in range(3)]
        for fake, value in zip(parts, (ends - own, own, ends), strict=True):
            append(recording, "rows_repeated", (value, counts), [fake])
        return picked_rows(x, *map(recording.handle, parts))

    return sized_in_block(recording, build)


@reads_unsized
def sequence_scatter(input: Any, index: Any, updates: Any, name: str | None = None) -> Any:
    """Return input with `updates` added: in row i at the columns of the i-th sequence of `index`.

    Shapes: input [n, m]; index int [rows, 1] and updates [rows, 1], ragged, of the same sequences.
    """
    with name_scope(name or default_main_program().unique("sequence_scatter")):
        own = _expect_one_level("sequence_scatter", index)
        join_rows(recording_of(default_main_program()), (index, updates))
        rows = record_call(torch.ops.penstock.sequence_rows, (own, index.shape[0], "sequence"), {})
        places = (rows, index.reshape([-1]).to(torch.int64))
        return torch.index_put(input, places, updates.reshape([-1]), accumulate=True)
