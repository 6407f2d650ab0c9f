"""Recording on into a Program that was read from text.

Its operators are run once on fake tensors, so that each of its variables has a handle that new calls can take. The text
does not say which values were detached or computed without gradients, so the operators that were read have no tape:
gradients reach what is recorded after, and a loss that would have to go through them is refused, never cut silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.initializers import SEED
from penstock.program.ir import Operator, Output, VarDesc
from penstock.program.kernels import CAPTURED, concrete, resolve
from penstock.program.legality import check
from penstock.program.program import Program
from penstock.program.record.context import recording_lock
from penstock.program.record.dispatch import results_of
from penstock.program.record.fakes import empty_fake
from penstock.program.record.recording import RNG, Recording

_SEEDS = {"penstock.dropout.default": 4, "penstock.random.default": 5, "penstock.distinct_ids.default": 3}
"""Type of a random operator -> position of its seed, which no other of a Program has."""


def replay(program: Program) -> Recording:
    """Return a Recording in which every dense variable of `program` has a handle. Raises ProgramError if it is illegal.

    Cost: about a millisecond an operator.
    """
    check(program)
    recording = Recording(program)
    recording.adopt_symbols()
    recording.active = 1  # what shape functions call is not recorded
    with recording_lock, torch.no_grad():
        for var in program.variables.values():
            if var.feed or var.persistable or var.name == RNG:
                _bind(recording, _fake(recording, var), var)
        for op in program.operators:
            if op.type != CAPTURED:
                _run(recording, op)
    recording.active = 0
    for var in program.parameters():
        tensor = recording.tensor_of(var.name)
        tensor.requires_grad_(var.trainable and tensor.is_floating_point())
    recording.num_replayed = len(program.operators)
    recording.num_seeds = _count_names(program)
    return recording


def _fake(recording: Recording, var: VarDesc) -> torch.Tensor:
    sizes = [_size(recording, dim) for dim in var.shape]
    return empty_fake(sizes, None, getattr(torch, var.dtype))


def _size(recording: Recording, dim: Dim) -> Any:
    return recording.symbols.size(dim)


def _with_sizes(recording: Recording, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_sizes(recording, v) for v in value)
    if isinstance(value, Expr) and value.symbols() == {SEED}:
        return 0  # of an initializer, whose shapes depend on no seed
    return _size(recording, value) if isinstance(value, Expr) else value


def _run(recording: Recording, op: Operator) -> None:
    args = [concrete(_with_sizes(recording, arg), {}, recording.tensor_of) for arg in op.args]
    kwargs = {name: concrete(_with_sizes(recording, v), {}, recording.tensor_of) for name, v in op.kwargs}
    out = results_of(recording, resolve(op), args, kwargs)
    results = out if isinstance(out, tuple) else (out,)
    for name, value in zip(op.outputs, results, strict=False):
        _keep(recording, name, value)


def _keep(recording: Recording, name: Output, value: Any) -> None:
    if isinstance(name, tuple):
        for one, part in zip(name, value, strict=True):
            _keep(recording, one, part)
    elif name is not None and not recording.program.variables[name].persistable:
        # Detached: a view of a parameter would else ask for a gradient as soon as the parameter does.
        _bind(recording, value.detach(), recording.program.variables[name])


def _bind(recording: Recording, fake: torch.Tensor, var: VarDesc) -> None:
    recording.adopt(fake, var)
    recording.handle(fake)


def _count_names(program: Program) -> int:
    """Let new operators have new names; return the number of seeds in use."""
    seeds = 0
    for name in program.variables:
        program.reserve(name.split(".")[0])
    for op in program.operators:
        program.reserve(op.name, operator=True)
        for part in op.module.split("."):
            program.reserve(part)
        at = _SEEDS.get(op.type)
        if at is not None and isinstance(seed := op.args[at], int) and op.args[at + 1] is not False:
            seeds = max(seeds, seed)
    return seeds


def refuse_gradients_through_text(recording: Recording, loss: str, wanted: Iterable[str]) -> None:
    """Raise ProgramError if the loss depends on one of the wanted parameters by an operator that was read from text."""
    program, trained = recording.program, set(wanted)
    needed = {loss}
    for number in range(len(program.operators) - 1, -1, -1):
        op = program.operators[number]
        if not needed & {*op.output_names(), *op.writes}:
            continue
        needed.update(op.input_names())
        lost = sorted(trained & set(op.input_names())) if number < recording.num_replayed else []
        if lost:
            raise ProgramError(
                f"loss {loss!r} depends on {lost[0]!r} by operator {op.name!r} ({op.source or 'no line'}), which was "
                "read from text, and text does not say where gradients end. Record the model again, or print "
                "the program after minimize; or train the new parameters alone: minimize(loss, parameter_list=[...])",
                operator=op.name,
                variable=lost[0],
            )
