"""Ragged variables of a Program: rows of all sequences one after another, the lengths of the sequences beside them.

`x` [T, …] with lod_level ≥ 1 has the lengths `x@LENGTHS` int64 [n, 1], which add up to T, its rows; n is the batch, or
with two levels the number of inner sequences, whose own lengths are `x@LENGTHS@LENGTHS`. Whatever has the rows T
belongs to the first such variable. `x@STEPS` int64 [m] is 0, 1, … to the longest of an input's sequences, if the
program pads them: m is a size that only a feed can say. A padded input, [batch, time, …], has lengths of the same name
and no rows of its own. `x@ROWS` int64 [T, 1] is ragged with the input x as its lengths, which are those that a script
feeds itself. Torch-free; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.program.expr import Dim, Expr
from penstock.program.ir import LENGTHS as LENGTHS
from penstock.program.ir import ROWS as ROWS
from penstock.program.ir import STEPS as STEPS
from penstock.program.ir import Structure, VarDesc


def is_declared_size(symbol: str) -> bool:
    """Whether a size symbol is of a size that the script has declared as a number (record/declared_sizes.py)."""
    return symbol.startswith("f")


def is_rows_of_positions(symbol: str) -> bool:
    """Whether a size symbol is the number of positions that rows are taken by (record/rows_of_positions.py)."""
    return symbol.startswith("r")


def batch_symbol(program: Structure) -> str:
    """Return the symbol of the batch; '' for a program without one."""
    return next((symbol for symbol in program.symbols[:1] if not is_declared_size(symbol)), "")


def is_ragged(program: Structure, name: str) -> bool:
    """Whether a variable's rows are apart from its sequences."""
    var, lengths = program.variables.get(name), program.variables.get(name + LENGTHS)
    if var is None or lengths is None or not var.lod_level or not var.shape:
        return False
    return isinstance(var.shape[0], Expr) and var.shape[0] != lengths.shape[0]


def ragged_with_rows(program: Structure, rows: Dim) -> VarDesc | None:
    """Return the first ragged variable with these rows; None if there is none."""
    if not isinstance(rows, Expr):
        return None
    found = (v for v in program.variables.values() if v.lod_level and v.shape and v.shape[0] == rows)
    return next((v for v in found if is_ragged(program, v.name)), None)


def levels_of(program: Structure, name: str) -> list[str]:
    """Return the lengths of a variable, outermost level first; none if it is not ragged."""
    levels: list[str] = []
    while is_ragged(program, name):
        name += LENGTHS
        levels.insert(0, name)
    return levels


def lengths_of(program: Structure, rows: Dim) -> list[str]:
    """Return the lengths of what has these rows, outermost level first; none if it is not ragged."""
    owner = ragged_with_rows(program, rows)
    return [] if owner is None else levels_of(program, owner.name)


def ragged_feeds(program: Structure) -> list[VarDesc]:
    """Return the ragged inputs, the lengths of outer levels among them."""
    return [v for v in program.variables.values() if v.feed and is_ragged(program, v.name)]


def steps_of(program: Structure) -> list[VarDesc]:
    """Return the inputs that are the steps of the longest sequence of another one, `name` without STEPS."""
    return [v for v in program.variables.values() if v.feed and v.name.endswith(STEPS)]


def row_symbols(program: Structure) -> Iterator[str]:
    """Give the symbols of rows and steps of ragged inputs, and of positions: they differ from step to step."""
    yield from filter(is_rows_of_positions, program.symbols)
    for var in (*ragged_feeds(program), *steps_of(program)):
        assert isinstance(var.shape[0], Expr)
        yield from var.shape[0].symbols()
