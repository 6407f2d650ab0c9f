"""Sequences in the order of their lengths: rank tables, and sequences by steps as an array, as a DynamicRNN of Fluid.

A table is an int64 variable [n, 2], so it can be fetched and fed to torch functions; in Fluid it is a type of its own.
Source: lod_rank_table.cc, reorder_lod_tensor_by_rank_op.cc, lod_tensor_to_array_op.cc, array_to_lod_tensor_op.cc,
shrink_rnn_memory_op.cc (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ArgumentError, ProgramError
from penstock.program.layers.levels import give_levels
from penstock.program.record.arrays import TensorArray, append, in_block, new_array
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized, sized_in_block
from penstock.program.sequences import lengths_of


@reads_unsized
def lod_rank_table(x: Any, level: int = 0) -> Any:
    """Return (index, length) of each sequence of x, longest first, int64 [n, 2]; equal lengths keep their order.

    `level`: of x's levels, 0 the outermost. Raises ProgramError if x has no such level.
    """
    program = default_main_program()
    levels = lengths_of(program, x.desc.shape[0]) if x.desc.shape else []
    if not 0 <= level < len(levels):
        raise ProgramError(
            f"{user_line()}: lod_rank_table(level={level}): {x!r} has {len(levels)} levels of sequences. Declare the "
            "input as fluid.layers.data(name, shape=[1], dtype='int64', lod_level=1)",
            variable=x.name,
        )
    with name_scope(program.unique("lod_rank_table")):
        lengths = program.handle(levels[level]).reshape([-1])
        order = torch.argsort(lengths, descending=True, stable=True)
        return torch.stack([order, lengths.index_select(0, order)], 1)


def max_sequence_len(rank_table: Any) -> Any:
    """Return the length of a table's longest sequence, int64 [1]."""
    with name_scope(default_main_program().unique("max_sequence_len")):
        return rank_table[:, 1].max().reshape([1])


@reads_unsized
def reorder_lod_tensor_by_rank(x: Any, rank_table: Any) -> Any:
    """Return the sequences of x, or its rows if it has none, in the order of a `lod_rank_table`.

    Shapes: x [n, …], or ragged of one level or two with n outer sequences; the result is what x is. A table of more
    sequences than x has is an OperatorError of the run.
    """
    program = default_main_program()
    levels = [program.handle(name) for name in (lengths_of(program, x.desc.shape[0]) if x.desc.shape else [])]
    with name_scope(program.unique("reorder_lod_tensor_by_rank")):
        order = rank_table[:, 0]
        if not levels:
            return x.index_select(0, order)
        recording = recording_of(program)
        return sized_in_block(recording, lambda: _reordered(recording, x, levels, order))


def _reordered(recording: Recording, x: Any, levels: list[Any], order: Any) -> Any:
    """The rows of x with their levels, outermost first, where `order` is of the outermost sequences."""
    ordered: list[Any] = []
    for lengths in levels:
        ends = lengths.cumsum(0)
        starts, own, ends = (part.index_select(0, order) for part in (ends - lengths, lengths, ends))
        ordered.append(own)
        places = empty_fake([recording.symbols.new_of_data()], None, torch.int64)
        append(recording, "rows_between", (starts, own, ends), [places])
        order = recording.handle(places)
    return give_levels(recording, x.index_select(0, order), ordered)


@reads_unsized
def lod_tensor_to_array(x: Any, table: Any) -> Any:
    """Return an array of the steps of x: element t has the rows at t of the sequences that have one, longest first.

    Shapes: x ragged [rows, …] of one level, the sequences of which `table` is (`lod_rank_table`). A table of others is
    an OperatorError of the run. Raises ProgramError for an x of other levels.
    """
    recording = recording_of(default_main_program())
    levels = lengths_of(recording.program, x.desc.shape[0]) if x.desc.shape else []
    if len(levels) != 1:
        raise ProgramError(
            f"{user_line()}: lod_tensor_to_array needs rows of sequences of one level (lod_level=1), got {x!r} with "
            f"{len(levels)}",
            variable=x.name,
        )
    with name_scope(recording.program.unique("lod_tensor_to_array")):
        array = new_array(recording, x.dtype)
        array.sizes, array.varies = [recording.symbols.new_of_data(), *recording.own(x).fake.shape[1:]], True
        in_block(recording, lambda: append(recording, "array_of_steps", (array, x, table), writes=True))
    return array


def array_to_lod_tensor(x: Any, table: Any) -> Any:
    """Return the rows of an array of steps as ragged rows, of sequences in the order before the table's.

    What `lod_tensor_to_array` divides, this joins. Elements of other rows than the table's steps have are an
    OperatorError of the run. Raises ArgumentError for an x that is no array, ProgramError for one without elements.
    """
    recording = recording_of(default_main_program())
    if not isinstance(x, TensorArray):
        raise ArgumentError(f"{user_line()}: array_to_lod_tensor needs an array (layers.create_array), got {x!r}")
    own = recording.own(x)
    if not own.sizes or own.is_mixed or own.levels:
        raise ProgramError(
            f"{user_line()}: array_to_lod_tensor: elements of {own.name!r} are rows of one dtype and one number of "
            "dimensions, without sequences; nothing like that was written to it",
            variable=own.name,
        )

    def join() -> Any:
        sizes = [recording.symbols.new_of_data() if at in own.varying else s for at, s in enumerate(own.sizes or ())]
        fakes = [
            empty_fake([recording.symbols.new_of_data(), *sizes[1:]], None, own.dtype),
            empty_fake([table.fake.shape[0], 1], None, torch.int64),
        ]
        append(recording, "rows_of_steps", (own, table), fakes)
        rows, lengths = (recording.handle(fake) for fake in fakes)
        return give_levels(recording, rows, [lengths])

    with name_scope(recording.program.unique("array_to_lod_tensor")):
        return sized_in_block(recording, join)


@reads_unsized
def shrink_memory(x: Any, i: Any, table: Any) -> Any:
    """Return the rows of x of those sequences that are longer than `i`, int64 of one element.

    Shapes: x [n, …] in the table's order, or [m, …] for those that had a step before; of a ragged x of one level whole
    sequences. Raises ProgramError for an x of two levels.
    """
    recording = recording_of(default_main_program())
    levels = [recording.handles[name] for name in lengths_of(recording.program, x.desc.shape[0])]
    if len(levels) > 1:
        raise ProgramError(f"{user_line()}: shrink_memory: {x!r} has {len(levels)} levels of sequences; expected one")

    def shrunk() -> Any:
        fakes = [empty_fake([recording.symbols.new_of_data(), *x.shape[1:]], None, x.dtype)]
        if levels:
            fakes.append(empty_fake([recording.symbols.new_of_data(), 1], None, torch.int64))
        append(recording, "rows_lasting", (x, i, table, levels), fakes)
        rows, *lengths = (recording.handle(fake) for fake in fakes)
        return give_levels(recording, rows, lengths) if lengths else rows

    with name_scope(recording.program.unique("shrink_memory")):
        return sized_in_block(recording, shrunk)


__all__ = [
    "array_to_lod_tensor", "lod_rank_table", "lod_tensor_to_array", "max_sequence_len", "reorder_lod_tensor_by_rank",
    "shrink_memory",
]  # fmt: skip
