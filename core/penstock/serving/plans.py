"""Updates of several blocks at once: their operators as one plan of the native engine.

A plan is made for each set of blocks that is updated together, most often all of a server, and run many times: no
Python runs between two operators, and blocks are updated at the same time, as far as there are threads. A block's own
operators run in order; those that have parts (`_PARTS`) as several instructions, of a share of the rows or elements
each, so that one block is updated on all cores too, with the same bits. Only dense blocks whose operators need no size
of the gradient are in plans.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.compat.torch import schema_of
from penstock.errors import OperatorError
from penstock.native.engine import Engine, EngineError, TorchPlan
from penstock.program.ir import Arg, Operator, Output, Ref
from penstock.program.kernels import concrete, operator_error, resolve
from penstock.ps.prepared import PreparedUpdate

_OF_ELEMENTS = frozenset({"penstock.sgd_.default", "penstock.adam_.default"})
_OF_ROWS = frozenset(f"penstock.sparse_{rule}_.default" for rule in ("sgd", "adam", "adagrad"))
"""Updates that have an overload `part`."""
PART_BYTES = 1 << 18  # of a dense parameter: less is done before a second thread has woken
_MAX_PLANS = 32  # sets of blocks; a server whose trainers push ever other sets makes plans anew

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """One block's operators over `bound` tensors, which outlive the plan; `fed`: what an update brings, by name."""

    name: str
    operators: Sequence[Operator]
    bound: Tensors
    fed: Sequence[str]


@dataclass(slots=True)
class _Plan:
    plan: TorchPlan
    fed: list[int]
    operators: list[Operator] = field(default_factory=list)


class UpdatePlans:
    """Plans of one server by the blocks that they update. Runs are one at a time. Thread-safe.

    `round`: the round block, of programs that have one.
    """

    def __init__(self, updates: Sequence[BlockUpdate], *, num_threads: int, round: BlockUpdate | None = None) -> None:
        self._round = round
        self._updates = {update.name: update for update in updates}
        self._num_threads = num_threads
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._step = 0

    def limit_threads(self, most: int) -> None:
        """Run with at most so many threads, from now on."""
        with self._lock:
            self._num_threads = min(self._num_threads, most)
            self._engine = None
            self._plans.clear()

    def __contains__(self, block: str) -> bool:
        return block in self._updates

    def run(self, fed: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Update these blocks with what each is fed. Raises OperatorError; writes before it remain."""
        names = tuple(fed)
        with self._lock:
            plan, engine = self._plan_of(names)
            tensors = [tensor for name in names for tensor in fed[name]]
            plan.plan.set_all(plan.fed, tensors)
            self._step += 1
            try:
                engine.run(plan.plan, self._step)
            except EngineError as error:
                raise _named(error, plan) from error
            finally:
                for slot in plan.fed:  # they look at memory of a message
                    plan.plan.clear(slot)

    def prepared(self, blocks: Sequence[str], *, begins_round: bool) -> PreparedUpdate:
        """Return the update of these blocks for native code, which runs it while `run` is not called.

        `begins_round`: the round block runs before.
        """
        with self._lock:
            plan, engine = self._plan_of(tuple(blocks))
            if begins_round and self._round is not None:
                plan = _plan([self._updates[name] for name in blocks], self._num_threads, self._round)

        def error(op_index: int, message: str, inputs: str) -> OperatorError:
            return _named(EngineError(message, instruction=-1, op_index=op_index, inputs=inputs), plan)

        return PreparedUpdate(engine.prepared(plan.plan, plan.fed), (engine, plan), error)

    def _plan_of(self, names: tuple[str, ...]) -> tuple[_Plan, Engine]:
        if self._engine is None:
            self._engine = Engine(self._num_threads, max_running=self._num_threads, intra_op_threads=1)
            self._engine.set_tracing(on=False)  # no thread reads it
        plan = self._plans.get(names)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[names] = _plan([self._updates[name] for name in names], self._num_threads)
        return plan, self._engine


def _named(error: EngineError, plan: _Plan) -> OperatorError:
    if not 0 <= error.op_index < len(plan.operators):
        return OperatorError(f"the server's update was interrupted: {error.message}", operator="")
    return operator_error(plan.operators[error.op_index], error.message, {"inputs": error.inputs})


def _plan(updates: Sequence[BlockUpdate], num_threads: int, before: BlockUpdate | None = None) -> _Plan:
    """Return a plan of these updates. `before`: is done first."""
    slots: dict[tuple[str, str], int] = {}  # (block, name); persistables of all blocks under ""

    def slot(update: BlockUpdate, name: str) -> int:
        key = ("" if name in update.bound else update.name, name)
        return slots.setdefault(key, len(slots))

    calls: list[tuple[BlockUpdate, Operator, list[tuple[str, object]], list[Any]]] = []
    all_updates = [*([] if before is None else [before]), *updates]
    for update in all_updates:
        for name in (*update.bound, *update.fed):
            slot(update, name)
        for op in update.operators:
            args = [_operand(update, arg, slot) for arg in _arguments(op)]
            outputs: list[Any] = [_output(update, output, slot) for output in op.outputs]
            calls.append((update, op, args, outputs))
    made = _Plan(TorchPlan(len(slots)), [slot(update, name) for update in updates for name in update.fed])
    last: dict[str, list[int]] = {}
    for index, (update, op, args, outputs) in enumerate(calls):
        made.operators.append(op)
        parts = _add(made.plan, index, op, args, outputs, _num_parts(update, op, num_threads))
        first = last.get(before.name, ()) if before is not None else ()
        for earlier in last.get(update.name, first):
            for at in parts:
                made.plan.edge(earlier, at)
        last[update.name] = parts
    for index in made.fed:
        made.plan.keep(index)
    bound = {slot(update, name): tensor for update in all_updates for name, tensor in update.bound.items()}
    for index in bound:
        made.plan.keep(index)
    made.plan.seal()
    made.plan.set_all(list(bound), list(bound.values()))
    return made


def _num_parts(update: BlockUpdate, op: Operator, num_threads: int) -> int:
    parameter = update.bound.get(op.input_names()[0]) if op.type in _OF_ELEMENTS else None
    if parameter is not None:
        return max(1, min(num_threads, parameter.nbytes // PART_BYTES))
    return num_threads if op.type in _OF_ROWS else 1


def _add(
    plan: TorchPlan, index: int, op: Operator, args: list[tuple[str, object]], outputs: list[Any], num_parts: int
) -> list[int]:
    """Add an operator as so many instructions; return their numbers."""
    schema = schema_of(resolve(op))
    if num_parts == 1:
        return [plan.add(schema.name, schema.overload_name, args, outputs, index)]
    return [
        plan.add(schema.name, "part", [*args, ("const", part), ("const", num_parts)], outputs, index)
        for part in range(num_parts)
    ]


def _arguments(op: Operator) -> list[Arg]:
    """Return an operator's arguments in the order of its schema, defaults in their places."""
    named = dict(op.kwargs)
    out: list[Arg] = []
    for position, argument in enumerate(schema_of(resolve(op)).arguments):
        given = op.args[position] if position < len(op.args) else named.get(argument.name, argument.default_value)
        out.append(given)
    return out


def _operand(update: BlockUpdate, value: Arg, slot: Any) -> tuple[str, object]:
    if isinstance(value, Ref):
        return "slot", slot(update, value.name)
    if isinstance(value, tuple) and any(isinstance(v, Ref) for v in value):
        return "slots", [slot(update, v.name) if isinstance(v, Ref) else -1 for v in value]
    return "const", concrete(value, {}, str)


def _output(update: BlockUpdate, value: Output, slot: Any) -> int | list[int] | None:
    if isinstance(value, tuple):  # of a block of control flow
        return [slot(update, name) for name in value]
    return None if value is None else int(slot(update, value))
