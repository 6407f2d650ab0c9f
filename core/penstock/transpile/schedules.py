"""Operators of learning rates that scripts compute by themselves, which run on servers as schedules do.

`noam_decay(…) * 2`, or a number that a `Switch` assigns, are operators of the forward pass when they are recorded. What
the rates of updates are computed of gets the role LR_SCHED here, if it reads no input and no parameter. An operator
whose results the trainer's own operators read as well runs on both sides, each with counters of its own. Pure.
Source: _get_lr_ops (Fluid 1.8), which takes the operators that were recorded under `_lr_schedule_guard`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.program.ir import Operator, Role, VarDesc
from penstock.program.program import Program, copy_structure

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED


def needed(operators: Sequence[Operator], wanted: Iterable[str], program: Program) -> tuple[Operator, ...]:
    """Return the operators that make what the variables `wanted` hold, in order: the closure over what these read."""
    storage = {name: var.storage for name, var in program.variables.items()}
    reached = {storage.get(n, n) for n in wanted}
    chosen: set[str] = set()
    grown = True
    while grown:
        grown = False
        for op in reversed(operators):
            if op.name not in chosen and reached & {storage.get(n, n) for n in op.output_arg_names}:
                chosen.add(op.name)
                reached |= {storage.get(n, n) for n in op.input_names()}
                grown = True
    return tuple(op for op in operators if op.name in chosen)


def copied(program: Program) -> Program:
    """Return a copy for reading; nothing is recorded into it."""
    return Program(**vars(copy_structure(program)), captured=dict(program.captured), memory_mark=program.memory_mark)


def with_schedules(program: Program) -> Program:
    """Return the program, or a copy in which operators of the forward pass that rates are computed of are LR_SCHED.

    Raises ProgramError for a rate that is computed of inputs or of parameters, or changed after its update.
    """
    operators = program.global_block().operators
    forward = [op for op in operators if op.role & Role.FORWARD]
    shared = [op for op in operators if op.role & _UPDATE and not op.role_vars]
    found = {op.name for op in needed([*forward, *shared], _rates(program, shared), program)}
    marked = {op.name: op for op in forward if op.name in found}
    for op in (*marked.values(), *(op for op in shared if op.role & Role.LR_SCHED)):
        _check_operands(op, program)
    if not marked:
        return program
    _refuse_late(operators, marked, program)
    made = copied(program)
    made.operators[:] = [replace(op, role=Role.LR_SCHED) if op.name in marked else op for op in operators]
    return made


def on_both_sides(program: Program, servers: Sequence[Operator], staying: Iterable[Operator]) -> frozenset[str]:
    """Return the names of the operators among `servers` whose results the operators `staying` with trainers read."""
    return frozenset(op.name for op in needed(servers, (n for op in staying for n in op.input_names()), program))


def _rates(program: Program, shared: Iterable[Operator]) -> list[str]:
    """What schedules read, and the persistable numbers that updates read."""
    names = [n for op in shared if op.role & Role.LR_SCHED for n in op.input_names()]
    updates = (op for op in program.global_block().operators if op.role & Role.OPTIMIZE and op.role_vars)
    read = (program.variables[n] for op in updates for n in op.input_names())
    return names + [var.name for var in read if var.persistable and not var.parameter and _is_one(var)]


def _is_one(var: VarDesc) -> bool:
    return all(d == 1 for d in var.shape)


def _refuse_late(operators: Iterable[Operator], marked: Collection[str], program: Program) -> None:
    """Raise ProgramError for a rate that is changed after an update with it: servers would change it before."""
    variables, used = program.variables, set[str]()
    for op in operators:
        if op.role & Role.OPTIMIZE and op.role_vars:
            storages = (variables[name].storage for name in op.input_names())
            used.update(name for name in storages if variables[name].persistable)
        written = (variables[name].storage for name in op.output_arg_names if op.name in marked)
        late = [name for name in written if name in used]
        if late:
            raise ProgramError(
                f"operator {op.name!r} ({op.source}) changes {late[0]!r} after the update that reads it as its "
                "learning rate, but parameter servers compute all rates before the updates. Change it before minimize",
                operator=op.name,
                variable=late[0],
            )


def _check_operands(op: Operator, program: Program) -> None:
    for name in op.input_names():
        var = program.variables[name]
        whole = program.variables.get(var.storage, var)
        if whole.feed or whole.parameter:
            kind = "an input" if whole.feed else "a parameter"
            raise ProgramError(
                f"operator {op.name!r} ({op.source}) computes a learning rate of {whole.name!r}, {kind}. In "
                "distributed training parameter servers compute the rates, and they have no inputs. Compute the rate "
                "of the number of the step: fluid.layers.noam_decay and other schedules, what a script computes of "
                "them, or fluid.layers.Switch over fluid.layers.autoincreased_step_counter()",
                operator=op.name,
                variable=whole.name,
            )
