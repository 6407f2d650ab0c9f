"""Inputs with several rows a sample: the label of every step of a sequence, [batch * steps, 1].

Fluid's -1 says no more than that a run knows the size. The recorder takes the first size of every input for the batch;
where an input, or what was made of it alone row by row, meets rows that are a multiple of the batch, s0 * 3 or
s0 * s1, it is declared again with these. Its rows are then checked and split by that expression (exec/feeding.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.compat.torch import tree_leaves
from penstock.program.expr import Dim, Expr, sym
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.record.fakes import empty_fake
from penstock.program.record.recording import Recording
from penstock.program.record.rows_of_inputs import Readers, input_of, readers_of
from penstock.program.sequences import batch_symbol, is_ragged, is_rows_of_positions


def multiply_rows(recording: Recording, operands: Any) -> None:
    """Take the rows of inputs among the operands for a multiple of the batch, where others have one."""
    with multiplied(recording, inputs_to_multiply(recording, operands)):
        pass


def inputs_to_multiply(recording: Recording, operands: Any) -> dict[str, Expr]:
    """The inputs among the operands that may have more rows than the batch, and the rows that the others have."""
    program = recording.program
    names = [leaf.name for leaf in tree_leaves(operands) if hasattr(leaf, "fake")]
    found = [program.variables[name] for name in dict.fromkeys(names) if name in program.variables]
    rows = {v.shape[0] for v in found if v.shape and (_of_positions(v.shape[0]) or is_multiple(program, v.shape[0]))}
    if len(rows) != 1 or recording.open_blocks:
        return {}
    (wanted,) = rows
    assert isinstance(wanted, Expr)  # by _is_multiple
    batch = sym(batch_symbol(program))
    names = [input_of(program, v.name) for v in found if v.shape[:1] == (batch,)]
    inputs = [program.variables[name] for name in dict.fromkeys(names) if name and name not in recording.declared]
    return {var.name: wanted for var in inputs if may_change(recording, var)}


@contextmanager
def multiplied(recording: Recording, rows: Mapping[str, Expr]) -> Iterator[None]:
    """Give inputs other rows within the block, and from then on if it succeeds."""
    before = {name: (recording.handles[name].fake, recording.program.variables[name]) for name in rows}
    readers = {name: Readers(recording, readers_of(recording, name) or []) for name in rows}
    try:
        for name, size in rows.items():
            fake, described = before[name]
            sizes = [recording.symbols.size(size), *fake.shape[1:]]
            made = empty_fake(sizes, None, fake.dtype).requires_grad_(fake.requires_grad)
            recording.declare_again(made, replace(described, shape=(size, *described.shape[1:])))
            readers[name].again(size)
        yield
    except BaseException:
        for fake, described in before.values():
            recording.declare_again(fake, described)
        for one in readers.values():
            one.undo()
        raise


def _of_positions(size: Dim) -> bool:
    return isinstance(size, Expr) and size.op == "sym" and is_rows_of_positions(str(size.args[0]))


def is_multiple(program: Program, size: Dim) -> bool:
    """Whether a size is the batch times something that feeds tell."""
    batch = batch_symbol(program)
    if not isinstance(size, Expr) or size.op != "*" or batch not in size.symbols():
        return False
    ones = dict.fromkeys(program.symbols, 1)
    if not size.symbols() <= ones.keys():
        return False
    once, twice, thrice = (size.evaluate({**ones, batch: n}) for n in (1, 2, 3))
    return (twice, thrice) == (2 * once, 3 * once)


def may_change(recording: Recording, var: VarDesc) -> bool:
    """Whether an input with one row a sample, and what was made of it, may get other rows."""
    program = recording.program
    is_plain = var.feed and not var.buffer and not is_ragged(program, var.name)
    if not is_plain or var.shape[:1] != (sym(batch_symbol(program)),):
        return False
    return readers_of(recording, var.name) is not None
