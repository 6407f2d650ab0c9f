"""Inputs with several rows a sample: the label of every step of a sequence, [batch * steps, 1].

Fluid's -1 says no more than that a run knows the size. The recorder takes the first size of every input for the batch;
where one meets rows that are a multiple of the batch, s0 * 3 or s0 * s1, it is declared again with these, and so is
what was computed of it, if nothing else with the batch took part and no gradient flows through it: smoothed labels.
Its rows are then checked and split by that expression (exec/feeding.py). Positions among such rows, by which `gather`
takes some (the words that a model has to guess), have a number of rows that the feed alone tells: `with_own_rows`.
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
from penstock.program.record.substitution import with_sizes
from penstock.program.sequences import batch_symbol, has_own_rows, is_ragged


def multiply_rows(recording: Recording, operands: Any) -> None:
    """Take the rows of inputs among the operands for a multiple of the batch, where others have one."""
    with multiplied(recording, inputs_to_multiply(recording, operands)):
        pass


def with_own_rows(recording: Recording, index: Any, x: Any) -> None:
    """Let an input, or what was computed of one, have rows of its own, as positions among several rows a sample."""
    var = recording.program.variables[index.name]
    if var.shape[:1] != (sym(batch_symbol(recording.program)),) or not _is_multiple(recording.program, x.desc.shape[0]):
        return
    if not recording.open_blocks and _may_change(recording, var):
        with multiplied(recording, {var.name: recording.symbols.dim(recording.new_symbol())}):
            pass


def inputs_to_multiply(recording: Recording, operands: Any) -> dict[str, Dim]:
    """The operands that may have more rows than the batch, and the rows that the others have."""
    program = recording.program
    names = [leaf.name for leaf in tree_leaves(operands) if hasattr(leaf, "fake")]
    found = [program.variables[name] for name in dict.fromkeys(names) if name in program.variables]
    rows = {v.shape[0] for v in found if v.shape and _is_other(program, v.shape[0])}
    if len(rows) != 1 or recording.open_blocks:
        return {}
    (wanted,) = rows
    return {v.name: wanted for v in found if _may_change(recording, v)}


@contextmanager
def multiplied(recording: Recording, rows: Mapping[str, Dim]) -> Iterator[None]:
    """Give inputs and what was computed of them other rows within the block, and from then on if it succeeds."""
    program, batch = recording.program, batch_symbol(recording.program)
    changed = {own: size for name, size in rows.items() for own in _connected(program, name)}
    before = {name: (recording.handles[name].fake, program.variables[name]) for name in changed}
    operators = list(program.operators)
    for name, size in changed.items():
        fake, described = before[name]
        shape = tuple(with_sizes(dim, {batch: size}) for dim in described.shape)
        made = empty_fake([recording.symbols.size(dim) for dim in shape], None, fake.dtype)
        recording.declare_again(made.requires_grad_(fake.requires_grad), replace(described, shape=shape))
    for at, op in enumerate(operators):
        sizes = [changed[name] for name in op.output_names() if name in changed]
        if sizes:
            program.operators[at] = with_sizes(op, {batch: sizes[0]})
    try:
        yield
    except BaseException:
        for fake, described in before.values():
            recording.declare_again(fake, described)
        program.operators[:] = operators
        raise


def _is_other(program: Program, size: Dim) -> bool:
    """Whether rows are a multiple of the batch, or those of an input that has its own."""
    own = any(var.shape[0] == size for var in program.variables.values() if has_own_rows(program, var))
    return own or _is_multiple(program, size)


def _is_multiple(program: Program, size: Dim) -> bool:
    """Whether a size is the batch times something that feeds tell."""
    batch = batch_symbol(program)
    if not isinstance(size, Expr) or size.op != "*" or batch not in size.symbols():
        return False
    ones = dict.fromkeys(program.symbols, 1)
    if not size.symbols() <= ones.keys():
        return False
    once, twice, thrice = (size.evaluate({**ones, batch: n}) for n in (1, 2, 3))
    return (twice, thrice) == (2 * once, 3 * once)


def _may_change(recording: Recording, var: VarDesc) -> bool:
    """Whether a variable has the batch as rows of inputs that nothing else with a batch depends on."""
    program = recording.program
    if var.shape[:1] != (sym(batch_symbol(program)),):
        return False
    names = _connected(program, var.name)
    near = [op for op in program.operators if not names.isdisjoint((*op.output_names(), *op.input_names()))]
    if any(not op.type.startswith("aten.") or op.writes for op in near) or not names <= recording.handles.keys():
        return False
    made = {name for op in near for name in op.output_names()}
    return all(_is_computed(recording, n) if n in made else _is_plain_input(recording, n) for n in names)


def _is_plain_input(recording: Recording, name: str) -> bool:
    var = recording.program.variables[name]
    is_plain = var.feed and not var.buffer and not is_ragged(recording.program, name)
    return is_plain and name not in recording.declared


def _is_computed(recording: Recording, name: str) -> bool:
    return not recording.tensor_of(name).requires_grad


def _connected(program: Program, name: str) -> set[str]:
    """What has the batch in its sizes and is connected by operators with a variable, itself included."""
    batch = batch_symbol(program)
    near: dict[str, set[str]] = {}
    for op in program.operators:
        names = {other for other in (*op.output_names(), *op.input_names()) if _has_symbol(program, other, batch)}
        for other in names:
            near.setdefault(other, set()).update(names)
    found, waiting = {name}, [name]
    while waiting:
        new = near.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _has_symbol(program: Program, name: str, symbol: str) -> bool:
    shape = program.variables[name].shape if name in program.variables else ()
    return any(isinstance(dim, Expr) and symbol in dim.symbols() for dim in shape)
