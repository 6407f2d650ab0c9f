"""What makes a Program legal, as one table of rules. Checked before a Program runs or travels.

1 every operand is fed, persistable, made by an earlier operator of its block, or the random state
2 every result is described, and made once
3 a view's storage is described and is no view itself
4 what an operator writes is among its operands
5 a symbol that appears is declared
6 a SelectedRows variable names two described parts
7 role_vars name a parameter
   a block that an operator names is legal on its own, given its inputs, and describes what it returns
8 no operator uses a table whose rows are on parameter servers, unless such tables are whole here
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import ProgramError
from penstock.program.expr import Expr
from penstock.program.initializers import SEED
from penstock.program.ir import Operator, SubBlock, structure_of, sub_blocks, unknown_variable
from penstock.program.program import Program

RNG = "@RNG@"


def check(program: Program, *, tables_are_whole: bool = False) -> None:
    """Raise ProgramError naming the first operator that breaks a rule. `tables_are_whole`: rule 8 does not hold."""
    for var in program.variables.values():
        root = program.variables.get(var.storage)
        if root is None or root.storage != root.name:
            raise ProgramError(
                f"rule 3: {var.name!r} is a view of {var.storage!r}, which is no storage", variable=var.name
            )
        if var.kind == "selected_rows" and not {var.rows, var.values} <= program.variables.keys():
            raise ProgramError(f"rule 6: parts of {var.name!r} are not described", variable=var.name)
        _check_symbols(program, var.shape, var.name)
    given = {v.name for v in program.variables.values() if v.feed or v.persistable} | {RNG}
    ready: dict[int, set[str]] = {}
    startup = {n for n, v in program.variables.items() if v.persistable}
    made: set[str] = set()
    for op in program.operators:
        in_block = ready.setdefault(op.block, set(given))
        _check_operator(program, op, in_block)
        if not tables_are_whole:
            _check_tables(program, op)
        for name in op.output_names():
            if name not in program.variables:
                raise ProgramError(
                    f"rule 2: operator {op.name!r} ({op.source}) makes {name!r}, which is not described",
                    operator=op.name,
                )
            if name in made and name not in startup:
                raise ProgramError(
                    f"rule 2: {name!r} is made a second time by operator {op.name!r} ({op.source})", operator=op.name
                )
            made.add(name)
        in_block.update(op.output_names())
        for block in sub_blocks(op):
            _check_block(op, block)


def _check_block(op: Operator, block: SubBlock) -> None:
    inside = Program(**vars(structure_of(block)))
    check(inside)
    known = {*block.inputs, *(n for inner in block.operators for n in inner.output_names())}
    missing = [n for n in (*block.inputs, *block.outputs) if n not in known or n not in inside.variables]
    if missing:
        raise ProgramError(
            f"rule 2: a block of operator {op.name!r} ({op.source}) has the input or result {missing[0]!r}, which "
            "nothing in it makes or describes",
            operator=op.name,
        )


def _check_operator(program: Program, op: Operator, ready: set[str]) -> None:
    inputs = op.input_names()
    for name in inputs:
        if name not in program.variables and name != RNG:
            raise ProgramError(
                f"rule 1: operator {op.name!r} ({op.source}): {unknown_variable(name, program.variables)}",
                operator=op.name,
            )
        if name not in ready:
            later = next((o for o in program.operators if name in o.output_names()), None)
            made = f"it is made later, by {later.name!r} ({later.source})" if later else "no operator makes it"
            raise ProgramError(
                f"rule 1: operator {op.name!r} ({op.source}) reads {name!r}, but {made}",
                operator=op.name,
                variable=name,
            )
    for name in op.writes:
        if name not in inputs:
            raise ProgramError(
                f"rule 4: operator {op.name!r} writes {name!r}, which is none of its operands", operator=op.name
            )
    for parameter, _ in op.role_vars:
        if not getattr(program.variables.get(parameter), "parameter", False):
            raise ProgramError(
                f"rule 7: operator {op.name!r} names {parameter!r}, which is no parameter", operator=op.name
            )
    _check_symbols(program, (*op.args, *(v for _, v in op.kwargs)), op.name)


def _check_tables(program: Program, op: Operator) -> None:
    for name in (*op.input_names(), *op.output_names()):
        var = program.variables.get(name)
        if var is not None and var.distributed:
            raise ProgramError(
                f"rule 8: operator {op.name!r} ({op.source}) uses table {name!r}, which is distributed "
                "(is_distributed=True): its rows are on parameter servers alone. Distribute the program with "
                "fluid.DistributeTranspiler().transpile(…) before it runs, or use is_distributed=False",
                operator=op.name,
                variable=name,
            )


def _check_symbols(program: Program, values: Any, owner: str) -> None:
    for value in _exprs(values):
        unknown = value.symbols() - set(program.symbols) - {SEED}
        if unknown:
            raise ProgramError(
                f"rule 5: {owner!r} uses the symbols {sorted(unknown)}, which the program does not declare"
            )


def _exprs(values: Any) -> Iterator[Expr]:
    for value in values:
        if isinstance(value, Expr):
            yield value
        elif isinstance(value, tuple):
            yield from _exprs(value)
