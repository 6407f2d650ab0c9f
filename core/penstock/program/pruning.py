"""What targets need of a Program: the operators that make them, or write memory that they are made of.

The operators are walked backwards: one stays if it makes a needed variable, or writes memory that a needed variable
lies in, by storage and not by version; then its operands are needed too. What an update writes behind the last operator
that a target needs is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.program.ir import Operator
from penstock.program.program import Program, copy_structure


def needed_for(program: Program, targets: Sequence[str]) -> tuple[list[Operator], set[str]]:
    """Return the operators that variables need, in order, and the names of all variables that these mention."""
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
    return kept[::-1], needed | memory


def cut_down(program: Program, operators: list[Operator], names: set[str], feeds: Sequence[str] = ()) -> Program:
    """Return a copy with these operators and variables. `feeds`: inputs that it has in any case, in their order."""
    copy = copy_structure(program)
    rest = {n: v for n, v in program.variables.items() if n in names and n not in feeds}
    copy.operators = operators
    copy.variables = {**{name: program.variables[name] for name in feeds}, **rest}
    return Program(**vars(copy), captured={n: v for n, v in program.captured.items() if n in rest})


def constants_among(program: Program, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` that an operator without operands makes, as `layers.fill_constant` does, for good."""
    written = {program.variables[w].storage for op in program.operators for w in op.writes}
    made = {
        n for op in program.operators if not op.input_names() and len(op.output_names()) == 1 for n in op.output_names()
    }
    return tuple(n for n in names if n in made and not program.variables[n].persistable and n not in written)


def counted_as(program: Program) -> Program:
    """Return the Program whose steps and fresh seed runs of this one have: itself, if it takes no other one's place."""
    return program if program.run_as is None else program.run_as


def with_fed_constants(program: Program, names: Sequence[str]) -> Program:
    """Return a copy in which these constants are inputs; its runs are counted as the program's, and have its seed."""
    operators = [op for op in program.operators if not set(op.output_names()) & set(names)]
    copy = cut_down(program, operators, set(program.variables))
    for name in names:
        copy.variables[name] = replace(copy.variables[name], feed=True)
    copy.run_as = counted_as(program)
    return copy


def pruned_for(program: Program, targets: Sequence[str]) -> Program:
    """Return a copy that makes the targets alone; its runs are counted as the program's, and have its seed."""
    copy = cut_down(program, *needed_for(program, targets))
    copy.run_as = counted_as(program)
    return copy
