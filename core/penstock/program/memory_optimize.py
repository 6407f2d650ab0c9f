"""`fluid.memory_optimize` and `fluid.release_memory`: a mark on a Program that says to give temporaries up early.

Executor then releases each temporary after the last operator that uses it, which it otherwise does when the run is
over; a ParallelExecutor does so in any case, and of a marked Program it lets temporaries share memory whatever
`BuildStrategy.memory_optimize` says. The mark is no part of a Program's text; `clone()` keeps it. Torch-free.

Source: memory_optimization_transpiler.py; from Fluid 1.6 on it did nothing but warn, and the documents win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import SpecError
from penstock.program.program import MemoryMark, Program


def memory_optimize(
    input_program: Program,
    skip_opt_set: Iterable[Any] | None = None,
    print_log: bool = False,
    level: int = 0,
    skip_grads: bool = True,
) -> None:
    """Mark a Program: its temporaries are released at their last use.

    `skip_opt_set`: variables or names that are kept to the end of the run. `skip_grads`: gradients of parameters are
    kept too, for operators that send them. `level`: 0 or 1, one and the same here. Raises SpecError, ProgramError.
    """
    if level not in (0, 1):
        raise SpecError(f"memory_optimize: level is {level!r}; expected 0 or 1", got=level, expected="0 or 1")
    names = frozenset(str(getattr(v, "name", v)) for v in skip_opt_set or ())
    for name in sorted(names):
        input_program.var(name)
    input_program.memory_mark = MemoryMark(names, bool(skip_grads))
    input_program.revision += 1
    if print_log:
        kept = kept_names(input_program)
        made = {n for op in input_program.operators for n in op.output_names()}
        temporaries = [n for n in made if not input_program.variables[n].persistable]
        released = sum(n not in kept for n in temporaries)
        print(f"penstock: memory_optimize releases {released} of {len(temporaries)} temporaries at their last use")


def release_memory(input_program: Program, skip_opt_set: Iterable[Any] | None = None) -> None:
    """Mark a Program as `memory_optimize` does, gradients included. Raises ProgramError."""
    memory_optimize(input_program, skip_opt_set, skip_grads=False)


def kept_names(program: Program) -> frozenset[str]:
    """Return the variables that the Program's mark keeps to the end of a run; none without a mark."""
    mark = program.memory_mark
    if mark is None:
        return frozenset()
    gradients = {g for op in program.operators for _, g in op.role_vars} if mark.skip_grads else set()
    whole = set(mark.skip) | gradients
    described = [program.variables[n] for n in whole if n in program.variables]
    parts = {p for v in described if v.kind == "selected_rows" for p in (v.rows, v.values)}
    return frozenset(whole | parts)


def releases(program: Program, fetched: Sequence[str]) -> list[tuple[str, ...]]:
    """Return for each operator of block 0 the temporaries that no later operator needs; none without a mark."""
    if program.memory_mark is None:
        return [()] * len(program.global_block().operators)
    variables, kept = program.variables, kept_names(program)
    parts = {p for n in fetched if n in variables for p in (variables[n].rows, variables[n].values)}
    last: dict[str, int] = {}
    for index, op in enumerate(program.global_block().operators):
        last.update(dict.fromkeys((*op.input_names(), *op.output_names()), index))
    found: list[list[str]] = [[] for _ in program.global_block().operators]
    for name, index in last.items():
        var = variables.get(name)
        if var is not None and not (var.persistable or var.feed or name in kept or name in fetched or name in parts):
            found[index].append(name)
    return [tuple(names) for names in found]
