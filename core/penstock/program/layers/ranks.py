"""Sequences in the order of their lengths: `lod_rank_table`, `max_sequence_len`, `reorder_lod_tensor_by_rank`.

A table is an int64 variable [n, 2], so it can be fetched and fed to torch functions; in Fluid it is a type of its own.
Source: lod_rank_table.cc, reorder_lod_tensor_by_rank_op.cc (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.levels import give_levels
from penstock.program.record.arrays import append
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


__all__ = ["lod_rank_table", "max_sequence_len", "reorder_lod_tensor_by_rank"]
