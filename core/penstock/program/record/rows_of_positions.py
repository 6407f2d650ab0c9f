"""Positions by which `gather` takes rows of words: several a sample, or none, as of the masked words of BERT.

Fluid's -1 says no more than that a run knows how many there are. An input with one row a sample, or what was made of it
alone row by row, that is the positions among rows that are a multiple of the batch, gets rows of its own, r0; so does
an input, such as the labels of these words, that meets what was taken by it (multiples.py). Where such rows meet others
of the batch that cannot change, there is one position a sample, and they are the batch from then on; so it is where a
recurrent block or an IfElse follows, which take rows apart by their number.
Positions count all rows of a feed, so such a feed is not split over replicas (exec/feeding.py).
"""

from __future__ import annotations

from typing import Any

from penstock.program.expr import Expr, sym
from penstock.program.record.multiples import is_multiple, may_change, multiplied
from penstock.program.record.recording import Recording
from penstock.program.record.rows_of_inputs import input_of
from penstock.program.record.substitution import substituted
from penstock.program.sequences import batch_symbol, is_rows_of_positions


def open_rows(recording: Recording, x: Any, index: Any) -> None:
    """Give the input that the positions `index` are made of rows of its own, where they are positions among words."""
    program = recording.program
    own, words = recording.own(index).desc, recording.own(x).desc
    batch = sym(batch_symbol(program)) if batch_symbol(program) else None
    if (
        recording.open_blocks
        or own.shape[:1] != (batch,)
        or not words.shape
        or not is_multiple(program, words.shape[0])
    ):
        return
    name = input_of(program, own.name)
    if not name or not may_change(recording, program.variables[name]):
        return
    rows = recording.symbols.dim(recording.new_rows_of_positions())
    assert isinstance(rows, Expr)
    with multiplied(recording, {name: rows}):
        pass


def fix_unequal_rows(recording: Recording, left: Any, right: Any) -> None:
    """Take rows of positions for the batch where one of two variables has them, and the other one the batch."""
    rows = {recording.own(one).desc.shape[:1] for one in (left, right)}
    batch = batch_symbol(recording.program)
    if (sym(batch),) in rows and any(len(own) == 1 and str(own[0]) in rows_as_batch(recording) for own in rows):
        fix_rows(recording)


def rows_as_batch(recording: Recording) -> dict[str, str]:
    """Rows of positions -> the batch, by which they may be the same; empty if there are none."""
    program = recording.program
    return dict.fromkeys(filter(is_rows_of_positions, program.symbols), batch_symbol(program))


def fix_rows(recording: Recording) -> None:
    """Take all rows of positions for the batch."""
    names = rows_as_batch(recording)
    if names:
        with substituted(recording, names):
            pass
