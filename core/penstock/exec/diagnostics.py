"""Explanations of a failing step: which id was out of range, and which operator made the first NaN or Inf.

`explained` adds to torch's message the id that left its table, since torch reports only that one did.

The check for NaN and Inf is off by default; PENSTOCK_CHECK_NAN=1 or `set_flags({"FLAGS_check_nan_inf": True})` turns it
on. Executor then looks at every result; a ParallelExecutor does not use its engine, but runs the same graph one
operator after another (`graph/interpret.py`), so that *first* has a meaning: a slow mode for finding a fault, without
operator events in its telemetry. What is an error: a NaN in anything that an operator makes or writes; an Inf there,
unless an operand that is no parameter had one before or the operator was given an infinite number (masks are made of
-inf on purpose). Memory that is not written yet is not looked at. The step ends at the error: updates come after the
whole backward pass, so a fault in the gradients leaves the parameters as they were. Cost: one more read of every
result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from penstock.errors import OperatorError, PenstockError
from penstock.exec import flags
from penstock.exec.devices import placed_on
from penstock.exec.lowering import Lowered
from penstock.graph.interpret import interpret
from penstock.graph.operands import operands
from penstock.graph.ssa import OpHandle
from penstock.program.ir import Arg, Operator, Ref, VarDesc
from penstock.program.kernels import concrete, operator_error, resolve, shape_text
from penstock.program.program import Program
from penstock.settings import CHECK_NAN


def named_operands(op: Operator, values: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) for each operand; `values`: those of the positional arguments, then of the named ones."""
    return list(_named((*op.args, *(v for _, v in op.kwargs)), values))


def _named(args: tuple[Arg, ...], values: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for arg, value in zip(args, values, strict=True):
        if isinstance(arg, Ref):
            yield arg.name, value
        elif isinstance(arg, tuple):
            yield from _named(arg, value)


def named_results(op: Operator, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each result that is kept and was made."""
    values = result if isinstance(result, tuple) else (result,)
    for name, value in zip(op.outputs, values, strict=False):
        if isinstance(name, tuple):
            yield from zip(name, value, strict=True)
        elif name is not None and value is not None:  # a kernel may leave out what its output mask excludes
            yield name, value


_NUMBERED = re.compile(r": lookup (\d+): ")  # as penstock.lookup_concat begins what it says of one of its lookups

# Type -> (position of the table, of the ids, of the dimension that the ids index; None: dimension 0).
_LOOKUPS: Mapping[str, tuple[int, int, int | None]] = {
    "aten.embedding.default": (0, 1, None),
    "aten.index_select.default": (0, 2, 1),
    "aten.gather.default": (0, 2, 1),
}


def explained(op: Operator, message: str, lookup: Callable[[str], torch.Tensor | None]) -> str:
    """Return the first line of torch's message, with the id that left its table if there is one."""
    return (message.strip().splitlines() or ["no message"])[0] + _out_of_range(op, lookup)


def blamed(handle: OpHandle, message: str) -> tuple[Operator, str]:
    """Return the operator that was recorded, of those that a pass has fused, and the message as it would have it."""
    found = _NUMBERED.search(message) if handle.parts else None
    if found is None:
        return handle.op, message
    op = handle.parts[int(found[1])]
    return op, f"{op.type.removesuffix('.default')}: {message[found.end() :]}"


def _out_of_range(op: Operator, lookup: Callable[[str], torch.Tensor | None]) -> str:
    if op.type not in _LOOKUPS:
        return ""
    table_at, ids_at, dim_at = _LOOKUPS[op.type]
    names = [op.args[i].name for i in (table_at, ids_at) if isinstance(op.args[i], Ref)]  # type: ignore[union-attr]  # Ref
    if len(names) != 2:
        return ""
    table, ids = (lookup(n) for n in names)
    if table is None or ids is None:
        return ""
    dim = 0 if dim_at is None else int(op.args[dim_at])  # type: ignore[arg-type]  # the schema's dim
    rows = table.shape[dim]
    wrong = ((ids < 0) | (ids >= rows)).nonzero()
    if not len(wrong):
        return ""
    place = wrong[0].tolist()
    what = "rows" if dim_at is None else f"elements along dimension {dim % table.dim()}"
    table_name, ids_name = (n.partition("#")[0] for n in names)
    return f" (id {ids[tuple(place)].item()} at {place} of {ids_name!r}: {table_name!r} has {what} 0 to {rows - 1})"


def operand_of(lowered: Lowered, handle: OpHandle, key: str) -> torch.Tensor | None:
    """Return an operand of a handle that has failed, computed again from feeds and persistables; None if it cannot be.

    The engine has emptied the slots of temporaries. Only handles that write nothing are run again.
    """
    makers = {name: h for h in lowered.graph.handles[: handle.index] for name in h.makes()}
    values: dict[str, Any] = {}

    def value(name: str) -> Any:
        if name not in values:
            kept = lowered.plan.get(lowered.slots[name])
            values[name] = kept if kept is not None else made(name)
        return values[name]

    def made(name: str) -> Any:
        maker = makers[name]
        if maker.op.writes or maker.kind != "computation":
            raise LookupError(name)
        bindings = lowered.now.bindings[maker.rows_of]
        args, kwargs = operands(maker, lowered.now)
        given = [concrete(a, bindings, value) for a in args]
        result = resolve(maker.op)(*given, **{k: concrete(v, bindings, value) for k, v in kwargs})
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip(maker.op.outputs, results, strict=False))[name]

    try:
        with torch.no_grad():
            found = value(key)
    except (LookupError, RuntimeError, PenstockError):  # it explains an error that is raised in any case
        return None
    return found if isinstance(found, torch.Tensor) else None


State = Literal["finite", "Inf", "NaN"]
_UNWRITTEN = ("aten.empty", "aten.new_empty")  # with their variants empty_like, empty_strided, …


def checks_results() -> bool:
    """Whether runs are checked now."""
    return flags.value_of(CHECK_NAN)


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

    tensors = {k: t for k, t in bound.items() if t is not None}
    values = interpret(lowered.graph, lowered.now, tensors, hook, placed_on(lowered.devices))
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
