"""Activations that are computed again in the backward pass instead of being kept: Fluid's `checkpoints`.

The forward pass up to its last checkpoint falls into segments, each of which ends with the operator that makes one.
What the backward pass reads of a segment, and what that is made of, is recorded a second time in front of the first
operator of the backward pass that reads it, so the activation itself is released within the forward pass. Kept are

- checkpoints, inputs, parameters and state, and what lies in their memory;
- what another segment reads, or what is behind the last checkpoint;
- results of operators that write, print, run Python or look up tables, and of those whose operands are written in
  place.

A second recording equals the first to the bit: kernels, operands and, as masks follow from the seed and the number of
an operator, random draws are the same. Batch norm computes its statistics again without writing the running ones.

The first operators of a segment read an operand through `penstock.delayed`, which waits for the gradient that arrives
at the segment: else a graph would run them as soon as the checkpoint is there, and hold all results to the end.

Pure: from a Program's plain data to the same. Source: _append_backward_ops_with_checkpoints_, backward.py (Fluid 1.8);
Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ProgramError
from penstock.program.ir import AGAIN, Arg, Operator, Output, Ref, Role, VarDesc, sub_blocks, unknown_variable
from penstock.program.program import Program
from penstock.program.record.source import user_line

_KEPT = {
    f"penstock.{name}.default"
    for name in ("print", "expect_true", "py_func", "py_func_grad", "lookup_table", "expect_rows", "checked_lengths")
}
_NORMS = {"aten.native_batch_norm.default", "aten._native_batch_norm_legit.default"}
_STATISTICS = slice(3, 5)
"""Running mean and variance among the operands of batch norm, which may be None in training."""
DELAYED = "penstock.delayed.default"
"""A graph has these wait for all of the backward pass that stands before them, gradients of parameters included."""


@dataclass(slots=True)
class _Segments:
    """What may be computed again. `makers`: name -> number of the operator; `numbers`: the segment of each operator of
    the forward pass, -1 behind the last checkpoint."""

    makers: dict[str, int]
    numbers: list[int]

    def of(self, name: str) -> int:
        """The segment that makes a variable."""
        return self.numbers[self.makers[name]]


def checkpoint_names(program: Program, checkpoints: Iterable[Any]) -> list[str]:
    """Return the names of variables, given as such or by name. Raises ProgramError for what the Program lacks."""
    names = [one if isinstance(one, str) else one.name for one in checkpoints]
    for name in names:
        if name not in program.variables:
            raise ProgramError(f"{user_line()}: checkpoint: {unknown_variable(name, program.variables)}", variable=name)
    return names


def recompute(program: Program, checkpoints: Collection[str], start: int) -> int:
    """Rewrite the backward pass, the operators from `start` on, so that it keeps checkpoints alone; return how many
    operators run a second time. `checkpoints`: names of variables that the forward pass makes."""
    segments = _segments(program, set(checkpoints), start)
    names: dict[str, str] = {}
    backward: list[Operator] = []
    made: list[str] = []  # gradients so far
    num_again = 0
    for op in program.operators[start:]:
        wanted = [n for n in op.input_names() if n in segments.makers and n not in names]
        for number in dict.fromkeys(segments.of(n) for n in wanted):
            group = _needed(program, segments, number, start)
            until = next((n for n in op.input_names() if n in set(made)), made[-1] if made else "")
            again = _again(program, group, names, until)
            backward += again
            num_again += len(group)
        backward.append(_renamed(op, names) if names.keys() & set(op.input_names()) else op)
        made += [n for n in op.output_names() if program.variables[n].kind == "dense"]
        for var in [program.variables[n] for n in op.output_names()]:  # views of what is made again
            program.variables[var.name] = replace(var, storage=names.get(var.storage, var.storage))
    program.operators[start:] = backward
    program.revision += 1
    return num_again


def _segments(program: Program, checkpoints: set[str], start: int) -> _Segments:
    forward, variables = program.operators[:start], program.variables
    ends = {i for i, op in enumerate(forward) if checkpoints & set(op.output_names())}
    begun = itertools.accumulate((i in ends for i in range(len(forward))), initial=0)  # ends before each operator
    found = _Segments({}, [-1 if number == len(ends) else number for number, _ in zip(begun, forward, strict=False)])
    written = {variables[n].storage for op in program.operators for n in op.writes}
    memory = {variables[name].storage for name in checkpoints}
    for index, op in enumerate(forward):
        if found.numbers[index] >= 0 and _is_repeatable(program, op, written, memory):
            found.makers |= dict.fromkeys(op.output_names(), index)
    _keep_what_crosses(program, found, forward)
    return found


def _is_repeatable(program: Program, op: Operator, written: set[str], kept: set[str]) -> bool:
    """Whether an operator may run twice. `written`: storages that change in place; `kept`: that checkpoints are in."""
    if op.role != Role.FORWARD or op.block or (op.writes and op.type not in _NORMS) or not op.input_names():
        return False
    inner = [(block.variables, block.operators) for block in sub_blocks(op)]
    types = [op.type, *(one.type for _, operators in inner for one in operators)]
    read = [program.variables[n] for n in op.input_names() if n in program.variables and n not in op.writes]
    made = [program.variables[n] for n in op.output_names()]
    roots = [program.variables[v.storage] for v in made]
    return (
        _KEPT.isdisjoint(types)
        and all(v.kind == "dense" for v in (*read, *made, *(v for variables, _ in inner for v in variables)))
        and not any(root.persistable or root.feed or root.name in kept for root in roots)
        and written.isdisjoint(v.storage for v in (*read, *made))
    )


def _keep_what_crosses(program: Program, found: _Segments, forward: Sequence[Operator]) -> None:
    """Keep what other segments read, and all that lies in the same memory."""
    memory = {name: program.variables[name].storage for name in found.makers}
    crossing = {
        memory[name]
        for index, op in enumerate(forward)
        for name in op.input_names()
        if name in memory and found.numbers[index] != found.of(name)
    }
    found.makers = {name: index for name, index in found.makers.items() if memory[name] not in crossing}


def _needed(program: Program, segments: _Segments, number: int, start: int) -> list[Operator]:
    """The operators of a segment that make what the backward pass reads, and what these are made of, in order."""
    own = {name: i for name, i in segments.makers.items() if segments.numbers[i] == number}
    todo = [own[n] for op in program.operators[start:] for n in op.input_names() if n in own]
    chosen: set[int] = set()
    while todo:
        index = todo.pop()
        if index not in chosen:
            chosen.add(index)
            todo += [own[n] for n in program.operators[index].input_names() if n in own]
    return [program.operators[index] for index in sorted(chosen)]


def _again(program: Program, group: Iterable[Operator], names: dict[str, str], until: str) -> list[Operator]:
    """The operators of a segment a second time. `names` gets what their results are called."""
    found: list[Operator] = []
    for op in group:
        op = replace(op, args=_without_statistics(op), writes=())
        own = _renamed(op, names)
        if own == op and until:
            waiting, own = _delayed(program, own, until)
            found.append(waiting)
        for name in op.output_names():
            names[name] = _described(program, program.variables[name], names)
        found.append(
            replace(
                own,
                name=program.unique_operator(op.name.rpartition("_")[0] or op.name),
                outputs=tuple(_output(out, names) for out in op.outputs),
                role=Role.BACKWARD,
            )
        )
    return found


def _without_statistics(op: Operator) -> tuple[Arg, ...]:
    if op.type not in _NORMS or not op.writes:
        return op.args
    args: list[Arg] = list(op.args)
    args[_STATISTICS] = [None, None]
    return tuple(args)


def _delayed(program: Program, op: Operator, until: str) -> tuple[Operator, Operator]:
    """An operator, and one before it that gives it its first operand when `until` is there."""
    described = [program.variables[n] for n in op.input_names() if n in program.variables]
    var = next((v for v in described if not v.persistable), described[0])
    name = _new_name(program, var.name)
    program.add_variable(VarDesc(name, var.shape, var.dtype, storage=var.storage, source=op.source))
    waiting = Operator(
        program.unique_operator("delayed"), DELAYED, (Ref(var.name), Ref(until)), (name,), role=Role.BACKWARD,
        module=op.module, source=op.source,
    )  # fmt: skip
    return waiting, _renamed(op, {var.name: name})


def _described(program: Program, var: VarDesc, names: dict[str, str]) -> str:
    name = _new_name(program, var.name)
    storage = name if var.storage == var.name else names.get(var.storage, var.storage)
    program.add_variable(replace(var, name=name, storage=storage))
    return name


def _new_name(program: Program, name: str) -> str:
    again = f"{name}{AGAIN}"
    return again if again not in program.variables else program.unique(again)


def _renamed(op: Operator, names: dict[str, str]) -> Operator:
    def arg(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names.get(value.name, value.name))
        return tuple(arg(v) for v in value) if isinstance(value, tuple) else value

    return replace(
        op,
        args=tuple(arg(a) for a in op.args),
        kwargs=tuple((k, arg(v)) for k, v in op.kwargs),
        writes=tuple(names.get(w, w) for w in op.writes),
    )


def _output(out: Output, names: dict[str, str]) -> Output:
    if isinstance(out, tuple):
        return tuple(names[n] for n in out)
    return None if out is None else names[out]
