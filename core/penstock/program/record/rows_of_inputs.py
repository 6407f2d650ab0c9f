"""What was made of one input alone, recorded again when the input gets other rows.

A label may be cast, counted or smoothed before it meets the logits of all words, whose rows it has in truth. Operators
that read it so far are run once more on fake tensors of these rows, and the batch in their sizes becomes that number.
"""

from __future__ import annotations

import torch

from penstock.compat.torch import tree_leaves
from penstock.program.expr import Dim, Expr, sym
from penstock.program.ir import Operator, Role, VarDesc
from penstock.program.kernels import concrete, resolve
from penstock.program.program import Program
from penstock.program.record.dispatch import results_of
from penstock.program.record.recording import RNG, Recording
from penstock.program.record.substitution import of_operator, of_sizes
from penstock.program.sequences import batch_symbol


def input_of(program: Program, name: str) -> str:
    """Return the only input with the batch's rows that a variable is made of: itself, if it is one; '' without one."""
    wanted, found = {name}, set[str]()
    for op in reversed(program.operators):
        if wanted & {*op.output_names(), *op.writes}:
            wanted.update(op.input_names())
    for one in wanted:
        var = program.variables[one]
        if var.feed and _has_batch(program, var):
            found.add(one)
    return found.pop() if len(found) == 1 else ""


def readers_of(recording: Recording, name: str) -> list[Operator] | None:
    """Return the operators that depend on an input, in order; None if one could not be run again for it alone.

    It does not work row by row (a sum over all rows is of the rows that there were), reads other values with the
    batch's rows, changes one in place, has a block, is differentiated, or draws numbers, by the rows that there were.
    """
    program, made, found = recording.program, {name}, list[Operator]()
    batch = sym(batch_symbol(program))
    for op in program.operators:
        if not made & set(op.input_names()):
            continue
        others = [program.variables[one] for one in op.input_names() if one not in made]
        alone = not any(var.persistable or _has_batch(program, var) for var in others)
        results = op.output_names()
        by_rows = all(program.variables[one].shape[:1] == (batch,) for one in results)
        if RNG in op.input_names() or not alone or not by_rows or op.writes or op._blocks or op.role != Role.FORWARD:
            return None
        made.update(results)
        found.append(op)
    fakes = [recording.fake_of(one) for one in made]
    return None if any(fake is None or fake.requires_grad for fake in fakes) else found


class Readers:
    """The operators that depend on an input. `again` records them with other rows, `undo` as they were."""

    def __init__(self, recording: Recording, operators: list[Operator]) -> None:
        self._recording, self._operators = recording, operators
        names = [name for op in operators for name in op.output_names()]
        self._before = [(recording.fake_of(name), recording.program.variables[name]) for name in names]

    def again(self, rows: Expr) -> None:
        """Put `rows` in place of the batch, of which the input has its new fake tensor already."""
        recording = self._recording
        names: dict[str, Dim] = {batch_symbol(recording.program): rows}
        recording.active += 1  # what shape functions call is not recorded
        try:
            with torch.no_grad():
                for op in self._operators:
                    self._run(of_operator(op, names), names)
        finally:
            recording.active -= 1
        self._replace({op.name: of_operator(op, names) for op in self._operators})

    def _run(self, op: Operator, names: dict[str, Dim]) -> None:
        recording = self._recording
        args = [_concrete(recording, arg) for arg in op.args]
        kwargs = {key: _concrete(recording, value) for key, value in op.kwargs}
        made = [leaf for leaf in tree_leaves(results_of(recording, resolve(op), args, kwargs)) if leaf is not None]
        for name, fake in zip(op.output_names(), made, strict=True):
            recording.declare_again(fake, of_sizes(recording.program.variables[name], names))

    def undo(self) -> None:
        """Put everything back."""
        for fake, described in self._before:
            if fake is not None:
                self._recording.declare_again(fake, described)
        self._replace({op.name: op for op in self._operators})

    def _replace(self, operators: dict[str, Operator]) -> None:
        all_ = self._recording.program.operators
        all_[:] = [operators.get(op.name, op) for op in all_]


def _has_batch(program: Program, var: VarDesc) -> bool:
    batch = batch_symbol(program)
    return any(isinstance(size, Expr) and batch in size.symbols() for size in var.shape)


def _concrete(recording: Recording, value: object) -> object:
    if isinstance(value, tuple):
        return [_concrete(recording, one) for one in value]
    if isinstance(value, Expr):
        return recording.symbols.size(value)
    return concrete(value, {}, recording.fake_of)  # type: ignore[arg-type]  # of plain data
