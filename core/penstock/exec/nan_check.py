"""The check mode that names the first operator which made a NaN or an Inf. Off by default.

On by `PENSTOCK_CHECK_NAN=1` or `set_flags({"FLAGS_check_nan_inf": True})`. Executor then looks at every result;
a ParallelExecutor does not use its engine, but runs the same graph one operator after another (`graph/interpret.py`),
so that *first* has a meaning: a slow mode for finding a fault, without operator events in its telemetry.

What is an error: a NaN in anything that an operator makes or writes; an Inf there, unless an operand that is no
parameter had one before or the operator was given an infinite number (masks are made of -inf on purpose). Memory
that is not written yet is not looked at. The step ends at the error: updates come after the whole backward pass,
so that a fault in the gradients leaves the parameters as they were. Cost: one more read of every result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from penstock.errors import OperatorError
from penstock.exec.flags import value_of
from penstock.exec.lowering import Lowered
from penstock.exec.out_of_range import explained
from penstock.exec.pairing import named_operands, named_results
from penstock.graph.interpret import interpret
from penstock.graph.ssa import OpHandle
from penstock.program.ir import Arg, Operator, VarDesc
from penstock.program.kernels import operator_error, shape_text
from penstock.program.program import Program

State = Literal["finite", "Inf", "NaN"]
_UNWRITTEN = ("aten.empty", "aten.new_empty")  # with their variants empty_like, empty_strided, …


def enabled() -> bool:
    """Whether runs are checked now."""
    return value_of("FLAGS_check_nan_inf")


def hook_of(program: Program) -> Callable[[Operator, list[Any], Callable[[], Any]], Any]:
    """Return a hook of `Executor.run_program` that raises OperatorError at the first NaN or Inf."""

    def hook(op: Operator, operands: list[Any], call: Callable[[], Any]) -> Any:
        return checked_call(op, operands, call, program.variables)

    return hook


def run_checked(lowered: Lowered, program: Program) -> None:
    """Run a bound plan's graph in order instead of in the engine, and leave in its slots what a step is asked for."""
    slots, plan = lowered.slots, lowered.plan
    bound = {key: plan.get(slot) for key, slot in slots.items()}
    described = {
        key: program.variables[v.name] for key, v in lowered.graph.variables.items() if v.name in program.variables
    }

    def hook(handle: OpHandle, operands: list[Any], call: Callable[[], Any]) -> Any:
        def guarded() -> Any:
            try:
                return call()
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                tensors = dict(named_operands(handle.op, operands))
                shapes = {_name(n, described): shape_text(t) for n, t in tensors.items()}
                message = explained(handle.op, str(error), tensors.get)
                raise operator_error(handle.op, message, shapes, max(handle.replica, 0)) from error

        return checked_call(handle.op, operands, guarded, described, max(handle.replica, 0))

    values = interpret(lowered.graph, lowered.shares, {k: t for k, t in bound.items() if t is not None}, hook)
    wanted = {slot for _, found in lowered.fetches for slot in found} | {slot for _, slot in lowered.made_persistables}
    for key, slot in slots.items():
        if slot in wanted and values.get(key) is not None:
            plan.set(slot, values[key])


def checked_call(
    op: Operator,
    operands: list[Any],
    call: Callable[[], Any],
    variables: Mapping[str, VarDesc],
    replica: int = 0,
) -> Any:
    """Call an operator and return its result. Raises OperatorError if it made a NaN or an Inf."""
    tensors = named_operands(op, operands)
    before = {n: state_of(t) for n, t in tensors if n in op.writes}
    result = call()
    if op.type.startswith(_UNWRITTEN):
        return result
    written = [(n, t) for n, t in tensors if n in op.writes]
    for made, tensor in (*named_results(op, result), *written):
        state = state_of(tensor)
        if state == "finite":
            continue
        states = {n: before[n] if n in before else state_of(t) for n, t in tensors}
        if state == "NaN" or not _excused(op, states, variables):
            raise _error(op, made, tensor, state, tensors, states, variables, replica)
    return result


def state_of(tensor: torch.Tensor) -> State:
    """Return the worst that a tensor holds; integers are finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all()):
        return "finite"
    return "NaN" if bool(torch.isnan(tensor).any()) else "Inf"


def _excused(op: Operator, states: Mapping[str, State], variables: Mapping[str, VarDesc]) -> bool:
    """Whether an Inf in a result was there before, or asked for."""
    if any(_infinite(value) for value in (*op.args, *(v for _, v in op.kwargs))):
        return True
    return any(s != "finite" and not (n in variables and variables[n].parameter) for n, s in states.items())


def _infinite(value: Arg) -> bool:
    if isinstance(value, tuple):
        return any(_infinite(v) for v in value)
    return isinstance(value, float) and not math.isfinite(value)


def _name(key: str, variables: Mapping[str, VarDesc]) -> str:
    return variables[key].name if key in variables else key


def _error(
    op: Operator,
    made: str,
    tensor: torch.Tensor,
    state: State,
    tensors: list[tuple[str, torch.Tensor]],
    states: Mapping[str, State],
    variables: Mapping[str, VarDesc],
    replica: int,
) -> OperatorError:
    wrong = int((torch.isnan(tensor) if state == "NaN" else ~torch.isfinite(tensor)).sum())
    shapes = {_name(n, variables): shape_text(t) for n, t in tensors}
    finite = {_name(n, variables): states[n] == "finite" for n, _ in tensors}
    known = {_name(n, variables): states[n] for n, _ in tensors}
    listed = ", ".join(
        f"{n!r} {shape} {'finite' if finite[n] else f'with {known[n]} before'}" for n, shape in shapes.items()
    )
    verb = "passed on" if state in states.values() else "made"
    where = f" in module {op.module!r}" if op.module else ""
    on = f" on replica {replica}" if replica else ""
    variable = _name(made, variables)
    return OperatorError(
        f"operator {op.name!r} ({op.type}), recorded at {op.source or 'an unknown line'}{where}, {verb} {state}{on}: "
        f"{wrong} of {tensor.numel()} elements of {variable!r} {shape_text(tensor)}\n"
        f"  its operands: {listed or 'none'}",
        operator=op.name, source=op.source, variable=variable, state=state, shapes=shapes, finite=finite,
        replica=replica,
    )  # fmt: skip
