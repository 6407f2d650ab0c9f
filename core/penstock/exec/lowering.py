"""Lower a graph for concrete batch sizes: operands become slots and constants of a native plan.

A Lowered plan belongs to one combination of rows per replica, other sizes, and fetches; it is run many
times. Sizes that differ from step to step, the rows of ragged inputs, are none of them: constants that follow from
these are set again for each run. Persistable tensors are bound once, and again when the scope's revision changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.compat.torch import schema_of
from penstock.exec.card_feeds import CardFeeds
from penstock.exec.devices import (
    Devices,
    DeviceStreams,
    DeviceTrace,
    StepGraph,
    has_card_dropout,
    kernel_name_on,
    on_gpus,
    put_on_device,
    streams_for,
)
from penstock.exec.memory import ReplicaMemory
from penstock.graph.across import WAITS
from penstock.graph.analysis.buffers import Buffers
from penstock.graph.operands import Shares, operands
from penstock.graph.ssa import SHARED, Graph, OpHandle
from penstock.native.engine import Arena, TorchPlan
from penstock.program.expr import Expr
from penstock.program.ir import Arg, Operator, Output, Ref
from penstock.program.kernels import concrete, resolve
from penstock.program.legality import RNG
from penstock.program.program import Program
from penstock.program.sequences import row_symbols


@dataclass(slots=True)
class PlannedMemory:
    """The memory of one lowered plan. `stays`: variables whose slots are kept; `observed_bytes`: of the first run."""

    stays: frozenset[str] = frozenset()
    buffers: Buffers | None = None
    arena: Arena | None = None
    observed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Varying:
    """A constant that follows from the rows of ragged inputs, and the arguments that it is: (instruction, position)."""

    value: Arg
    rows_of: int
    places: list[tuple[int, int]]


@dataclass(slots=True)
class Lowered:
    """A native plan and what a run has to put in and take out. `shares`: for which it was lowered; `now`: as it is."""

    graph: Graph
    shares: Shares
    plan: TorchPlan
    slots: dict[str, int]
    fetches: list[tuple[str, list[int]]]
    random_states: list[torch.Tensor]
    made_persistables: list[tuple[str, int]]
    passing: list[int] = field(default_factory=list)  # fetched slots that hold neither a feed nor a persistable
    bound_revision: int = -1
    feed_slots: list[dict[str, int]] = field(default_factory=list)
    devices: Devices = ()
    streams: DeviceStreams | None = None  # of a plan over GPUs, as the next two
    card_feeds: CardFeeds | None = None
    step_graph: StepGraph | None = None
    random_slots: tuple[int, ...] = ()  # of states that the cards read
    memory: PlannedMemory = field(default_factory=PlannedMemory)
    signature: int = -1  # of the exchanges with other processes, once it was asked for
    varying: list[_Varying] = field(default_factory=list)
    now: Shares = field(default_factory=lambda: Shares([], []))
    _in_order: list[list[int]] | None = None

    def slots_in_order(self, names: Sequence[str]) -> list[list[int]]:
        """Return the slots of these inputs on each active replica, -1 where a plan has none. Found once."""
        if self._in_order is None:
            self._in_order = [[slots.get(name, -1) for name in names] for slots in self.feed_slots]
        return self._in_order


def lower(
    program: Program,
    graph: Graph,
    shares: Shares,
    fetches: Sequence[str],
    memory: ReplicaMemory,
    stays: Set[str] = frozenset(),
    trace: DeviceTrace | None = None,
) -> Lowered:
    """Return the plan of `graph` for `shares`. `trace`: gets the times of its operators on GPUs.

    Raises ProgramError for an operator that torch does not have.
    """
    slots = {key: i for i, key in enumerate(graph.variables)}
    unused = _unused_inputs(program, graph, slots, fetches)
    plan = TorchPlan(len(slots))
    varying = _VaryingConstants(frozenset(row_symbols(program)))
    for handle in graph.handles:
        name, overload, args = _call(handle, shares, slots, memory.device(handle.replica))
        outputs = [_out(o, slots) for o in handle.op.outputs]
        waits = handle.op.type in WAITS  # for other processes: not on a thread that computes
        index = plan.add(name, overload, args, outputs, handle.index, affinity=handle.replica, host=waits)
        varying.note(handle, index)
        for before in handle.before:
            plan.edge(before, index)
    memory.settle(graph.homes)
    fetched = [(name, _fetch_slots(graph, slots, name)) for name in fetches]
    for key, variable in graph.variables.items():
        if variable.persistable or variable.feed or variable.name == RNG or key in stays:
            plan.keep(slots[key])
    for _, indices in fetched:
        for slot in indices:
            plan.keep(slot)
    plan.seal()
    streams = streams_for(graph, memory.devices, trace)
    if streams is not None:
        plan.use_devices(streams.plan)
    made = {n for h in graph.handles for n in h.makes() if graph.variables[n].persistable}
    lowered = Lowered(
        graph,
        shares,
        plan,
        slots,
        fetched,
        [],
        [(v.name, slots[n]) for n in made if (v := graph.variables[n]).replica in (SHARED, memory.home(v.name))],
    )
    lowered.memory.stays = frozenset(stays)
    lowered.varying, lowered.now = varying.found(), shares
    lasting = {slots[k] for k, v in graph.variables.items() if v.persistable or v.feed}
    lowered.passing = sorted({s for _, found in fetched for s in found} - lasting)
    lowered.feed_slots = [{**_feeds(graph, slots, r), **own} for r, own in enumerate(unused)]
    lowered.devices, lowered.streams = memory.devices, streams
    _random_states(lowered)
    if on_gpus(memory.devices):
        _feed_cards(lowered, program)
    bind(lowered, program, memory)
    return lowered


class _VaryingConstants:
    """Finds the constants of a plan in which the symbols `rows` occur."""

    def __init__(self, rows: Set[str]) -> None:
        self._rows = rows
        self._places: dict[tuple[Arg, int], list[tuple[int, int]]] = {}

    def note(self, handle: OpHandle, instruction: int) -> None:
        if not self._rows:
            return
        named = dict(handle.op.kwargs)
        for position, parameter in enumerate(schema_of(resolve(handle.op)).arguments):
            value = handle.op.args[position] if position < len(handle.op.args) else named.get(parameter.name)
            if _symbols(value) & self._rows:
                self._places.setdefault((value, handle.rows_of), []).append((instruction, position))

    def found(self) -> list[_Varying]:
        return [_Varying(value, rows_of, places) for (value, rows_of), places in self._places.items()]


def _symbols(value: Arg) -> Set[str]:
    if isinstance(value, Expr):
        return value.symbols()
    return frozenset().union(*map(_symbols, value)) if isinstance(value, tuple) else frozenset()


def resize(lowered: Lowered, shares: Shares) -> None:
    """Set the plan for shares that differ from its own in the rows of ragged inputs alone."""
    lowered.plan.set_constants(
        [(concrete(v.value, shares.bindings[v.rows_of], lambda _: None), v.places) for v in lowered.varying]
    )
    lowered.now = shares


def bind(lowered: Lowered, program: Program, memory: ReplicaMemory) -> None:
    """Put the persistable tensors into their slots, unless the scope has not changed since the last time."""
    if lowered.bound_revision == memory.scope.revision:
        return
    memory.refresh()
    made = {name for name, _ in lowered.made_persistables}  # on each replica
    for key, variable in lowered.graph.variables.items():
        if variable.persistable and variable.storage == key and variable.name not in made:
            lowered.plan.set(lowered.slots[key], memory.tensor(program, variable))
    lowered.bound_revision = memory.scope.revision


def _call(
    handle: OpHandle, shares: Shares, slots: Mapping[str, int], device: torch.device | None
) -> tuple[str, str, list[tuple[str, object]]]:
    schema = schema_of(resolve(handle.op))
    args, kwargs = operands(handle, shares)
    named = dict(kwargs)
    bindings = shares.bindings[handle.rows_of]
    out: list[tuple[str, object]] = []
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            out.append(_operand(args[position], slots, bindings))
        elif argument.name in named:
            out.append(_operand(named[argument.name], slots, bindings))
        else:
            out.append(("const", argument.default_value))
    if device is not None:
        put_on_device(schema, out, device)
    return kernel_name_on(schema.name, device), schema.overload_name, out


def _operand(value: Arg, slots: Mapping[str, int], bindings: Mapping[str, int]) -> tuple[str, object]:
    if isinstance(value, Ref):
        return "slot", slots[value.name]
    if isinstance(value, tuple) and any(isinstance(v, Ref) for v in value):
        return "slots", [slots[v.name] if isinstance(v, Ref) else -1 for v in value]
    return "const", concrete(value, bindings, lambda _: None)


def _out(value: Output, slots: Mapping[str, int]) -> int | list[int] | None:
    if isinstance(value, tuple):
        return [slots[v] for v in value]
    return None if value is None else slots[value]


def _fetch_slots(graph: Graph, slots: Mapping[str, int], name: str) -> list[int]:
    """Slots of a variable on the active replicas; a shared one once for each."""
    found = []
    for replica in range(graph.active):
        home = f"{name}#{graph.homes.get(name, 0)}"
        slot = slots.get(f"{name}#{replica}", slots.get(name, slots.get(home, -1)))
        if slot < 0:
            return []
        found.append(slot)
    return found


def _unused_inputs(
    program: Program, graph: Graph, slots: dict[str, int], fetches: Sequence[str]
) -> list[dict[str, int]]:
    """Add slots for inputs that are fetched though no operator reads them; return each active replica's."""
    found: list[dict[str, int]] = [{} for _ in range(graph.active)]
    for name in fetches:
        if program.variables[name].feed and not _fetch_slots(graph, slots, name):
            for replica, own in enumerate(found):
                own[name] = slots[f"{name}#{replica}"] = len(slots)
    return found


def _feeds(graph: Graph, slots: Mapping[str, int], replica: int) -> dict[str, int]:
    return {v.name: slots[k] for k, v in graph.variables.items() if v.feed and v.replica == replica}


def _random_states(lowered: Lowered) -> None:
    for replica in range(lowered.graph.active):
        slot = lowered.slots.get(f"{RNG}#{replica}")
        if slot is not None:
            state = torch.zeros(3, dtype=torch.int64)
            lowered.plan.set(slot, state)
            lowered.random_states.append(state)


def _feed_cards(lowered: Lowered, program: Program) -> None:
    """Have feeds brought to the cards, and random states too, if only dropout reads them and has a kernel there."""
    keys = {f"{RNG}#{replica}" for replica in range(lowered.graph.active)}
    readers = [h for h in lowered.graph.handles if keys.intersection(h.reads())]
    takes_card = all(h.op.type == "penstock.dropout.default" and not _is_double(program, lowered, h) for h in readers)
    if lowered.random_states and takes_card and has_card_dropout():
        lowered.random_slots = tuple(lowered.slots[f"{RNG}#{r}"] for r in range(lowered.graph.active))
    slots = [
        [*own.values(), *lowered.random_slots[replica : replica + 1]] for replica, own in enumerate(lowered.feed_slots)
    ]
    lowered.card_feeds = CardFeeds(slots, lowered.devices, vary=any(row_symbols(program)))


def _is_double(program: Program, lowered: Lowered, handle: OpHandle) -> bool:
    """Whether an operator's first operand is float64, for which Triton's numbers are too short."""
    first = handle.op.args[0]
    described = program.variables.get(lowered.graph.variables[first.name].name) if isinstance(first, Ref) else None
    return described is None or described.dtype == "float64"


def set_random_states(lowered: Lowered, seed: int, step: int, rows: Sequence[int], first: int = 0) -> None:
    """Write (seed, step, first global row) into each replica's random state. `first`: that of the first replica."""
    for replica, state in enumerate(lowered.random_states):
        state[0], state[1], state[2] = seed, step, first
        first += rows[replica]
    if lowered.random_slots:  # which hold what was brought to the cards for the step before
        lowered.plan.set_all(lowered.random_slots, lowered.random_states)


def static_shapes(program: Program, op: Operator, graph: Graph, bindings: Mapping[str, int]) -> dict[str, str]:
    """Return 'float32[500, 400]' for each operand of a handle's operator, from descriptions alone."""
    shapes: dict[str, Any] = {}
    for key in op.input_names():
        var = program.variables.get(graph.variables[key].name)
        if var is not None:
            sizes = [d if isinstance(d, int) else d.evaluate(bindings) for d in var.shape]
            shapes[var.name] = f"{var.dtype}{sizes}"
    return shapes
