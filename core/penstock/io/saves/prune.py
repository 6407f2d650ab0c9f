"""The part of a Program that its targets need. Pure.

Walks the operators backwards. An operator stays if a variable that it makes is needed, or if it writes memory that
a needed variable lies in; then its operands are needed too. Writes are followed by storage, not by version: an
operator that writes a needed storage later than anyone reads it stays, which is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import UserError
from penstock.program.ir import Operator, unknown_variable
from penstock.program.program import Program, copy_structure


def pruned(program: Program, feeds: Sequence[str], targets: Sequence[str]) -> Program:
    """Return a copy with what `targets` need; its inputs are exactly `feeds`, in their order.

    Raises UserError for a target or feed that is not in the Program, and for a needed input that is not in `feeds`.
    """
    _check(program, feeds, targets)
    storage = {name: var.storage for name, var in program.variables.items()}
    needed = set(targets)
    memory = {storage[name] for name in targets}
    kept: list[Operator] = []
    for op in reversed(program.operators):
        if needed.isdisjoint(op.output_names()) and memory.isdisjoint(storage[w] for w in op.writes):
            continue
        kept.append(op)
        needed.update(op.input_names(), op.output_names())
        memory.update(storage[name] for name in (*op.input_names(), *op.output_names()))
    for var in program.feeds():
        if var.name in needed and var.name not in feeds:
            raise UserError(
                f"the targets {list(targets)} need the input {var.name!r} (created at {var.source}), but it is not "
                f"among feeded_var_names {list(feeds)}",
                variable=var.name,
            )
    return _copy(program, kept[::-1], list(feeds), needed | memory)


def _check(program: Program, feeds: Sequence[str], targets: Sequence[str]) -> None:
    if not targets:
        raise UserError("target_vars is empty; expected at least one variable to compute")
    for name in (*feeds, *targets):
        if name not in program.variables:
            raise UserError(unknown_variable(name, program.variables), variable=name)
    for name in feeds:
        if not program.variables[name].feed:
            raise UserError(
                f"feeded_var_names holds {name!r}, which is no input of the program; "
                f"expected some of {[v.name for v in program.feeds()]}",
                variable=name,
            )


def _copy(program: Program, operators: list[Operator], feeds: list[str], needed: set[str]) -> Program:
    copy = copy_structure(program)
    rest = {n: v for n, v in program.variables.items() if n in needed and n not in feeds}
    copy.operators = operators
    copy.variables = {**{name: program.variables[name] for name in feeds}, **rest}
    return Program(**vars(copy), captured={n: v for n, v in program.captured.items() if n in rest})
