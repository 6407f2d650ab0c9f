"""Temporaries of a ParallelExecutor: its first run of a plan is watched, later ones use planned memory.

The thin shell around `graph/analysis/buffers.py`: it asks the native plan what a run has allocated, names it in terms
of the graph, and hands the offsets back. Plans that run in turn share one arena. On failure of a step nothing is
learned from it, and what is planned stays. `statistics` counts what an executor holds: plain numbers for reports and
tests; bytes are of CPU memory unless stated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.compat.torch import schema_of
from penstock.errors import Unavailable
from penstock.exec.flags import value_of
from penstock.exec.lowering import Lowered
from penstock.exec.strategies import ExecutionStrategy
from penstock.graph.analysis.buffers import Buffers, plan
from penstock.graph.analysis.liveness import Allocation, staying
from penstock.graph.passes import PassChoice
from penstock.graph.ssa import Graph, OpHandle
from penstock.logger import warn_once
from penstock.machine.memory import return_freed, usable_bytes
from penstock.native.engine import Arena
from penstock.program.ir import Arg, Ref
from penstock.program.kernels import resolve
from penstock.program.memory_optimize import kept_names
from penstock.program.program import Program
from penstock.settings import EAGER_DELETE

_log = logging.getLogger(__name__)
RETURNED_FROM = 1 << 28
"""Bytes of a watched run's temporaries from which they are given back to the machine, before the arena takes theirs."""
Seen = tuple[int, int, int, list[tuple[int, int]], bool, list[int]]
"""An allocation in the native plan's words: instruction, bytes, occurrence, results, freed, twins."""


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """What happens to temporaries. `eager`: released with their last use; `every`: runs until others are cleared."""

    eager: bool = True
    every: int = 1


def retention(execution: ExecutionStrategy) -> ReleasePolicy:
    """Return the strategy's setting, and FLAGS_eager_delete_tensor_gb now (below 0: nothing is released in a run).

    Warns once if the strategy's has no effect, and is not the default.
    """
    eager, every = value_of(EAGER_DELETE) >= 0, execution.num_iteration_per_drop_scope
    if eager and every != ReleasePolicy().every:
        why = "eager deletion leaves no temporary between runs; FLAGS_eager_delete_tensor_gb below 0 turns it off"
        text = f"ExecutionStrategy.num_iteration_per_drop_scope = {every} has no effect: {why}"
        warn_once(_log, text)
    return ReleasePolicy(eager, every)


def check_shared_memory(needed: int, usable: int) -> None:
    """Raise Unavailable if a step's shared memory, in bytes, is more than the process may use.

    It is taken at once, so the kernel would end processes of the control group on the way.
    """
    if needed > usable:
        raise Unavailable(
            f"a step needs {needed >> 20} MiB of memory that the trainers of this host share, and this process may use "
            f"{usable >> 20} MiB (`penstock doctor`); use a smaller batch, or raise the limit of its control group",
            got=needed,
            expected=f"<= {usable}",
        )


class Temporaries:
    """Of all plans of one executor. Not thread-safe, as the executor.

    `shared`: other trainers of this host sum gradients where they lie.
    """

    def __init__(self, program: Program, choice: PassChoice, retention: ReleasePolicy, *, shared: bool = False) -> None:
        self.program, self.choice, self.retention = program, choice, retention
        self._shared = shared
        self._arena = Arena(shared=shared)
        self._last: Lowered | None = None
        self.runs = self.peak_bytes = 0

    def stays(self, graph: Graph) -> frozenset[str]:
        """Return the physical variables that hold their memory after a run of `graph`.

        None with eager deletion: what a Program's mark keeps to the end of a run cannot be fetched after it.
        """
        return frozenset() if self.retention.eager else staying(graph, eager=False)

    def before(self, lowered: Lowered) -> None:
        """Prepare a run of `lowered` in the engine: have it watched, or placed."""
        memory = lowered.memory
        _clear(lowered)
        if memory.buffers is not None or lowered.streams is not None:  # on GPUs torch's caching allocator plans
            return
        seen = lowered.plan.observed()
        if seen is None:
            lowered.plan.observe()
            return
        memory.observed_bytes = lowered.plan.unplanned_peak
        buffers = self._planned(lowered, seen)
        if self._shared:
            check_shared_memory(buffers.arena_bytes, usable_bytes())
        memory.buffers = buffers
        memory.arena = Arena(self._arena, shared=self._shared) if memory.stays else self._arena
        place(lowered, buffers, memory.arena, lasting=bool(memory.stays))
        if memory.observed_bytes >= RETURNED_FROM:
            return_freed()

    def _planned(self, lowered: Lowered, seen: Sequence[Seen]) -> Buffers:
        graph = lowered.graph
        names = list(graph.variables)
        kept = staying(graph, eager=self.retention.eager, kept=kept_names(self.program))
        passing = [slot for slot in lowered.passing if slot < len(names)]  # behind them: inputs that nothing reads
        fetched = {graph.variables[names[slot]].storage for slot in passing}
        return plan(
            graph,
            allocations_of(graph, seen),
            pinned=fetched,
            lasting={graph.variables[key].storage for key in kept},
            reuse=self.choice.reuse_buffers or self.program.memory_mark is not None,
            inplace=self.choice.inplace,
        )

    def after(self, lowered: Lowered, plans: Iterable[Lowered], *, fetches: bool) -> None:
        """Count a run, and clear what stays after it, when it is time.

        Feeds stay with the plan that runs again and again, but not with one that has not run last.
        """
        self.runs += 1
        if self._last is not None and self._last is not lowered:
            _clear_feeds(self._last)
        self._last = lowered
        self.peak_bytes = max(self.peak_bytes, self.arena_bytes + lowered.plan.unplanned_peak)
        if lowered.memory.stays and (fetches or self.runs % self.retention.every == 0):
            for each in plans:
                _clear(each)

    def drop(self) -> None:
        """Give the arena back. Tensors that still lie in it keep it alive, and it counts until they are gone."""
        self._arena.release()
        self._last = None

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arenas of all plans that are not freed, those included that only a kept tensor holds."""
        return self._arena.living


def _clear(lowered: Lowered) -> None:
    for key in lowered.memory.stays:
        slot = lowered.slots[key]
        if slot not in lowered.passing:
            lowered.plan.clear(slot)


def _clear_feeds(lowered: Lowered) -> None:
    for slots in lowered.feed_slots:
        for slot in slots.values():
            lowered.plan.clear(slot)


def place(lowered: Lowered, buffers: Buffers, arena: Arena, *, lasting: bool) -> None:
    """Give a native plan its offsets."""
    blocks = list(zip(buffers.offsets, buffers.sizes, buffers.checks, strict=True))
    entries = [
        (a.handle, a.nbytes, a.occurrence, block, operand)
        for a, block, operand in zip(buffers.allocations, buffers.block_of, buffers.operand_of, strict=True)
    ]
    lowered.plan.place(arena, blocks, entries, lasting=lasting)


def allocations_of(graph: Graph, seen: Iterable[Seen]) -> list[Allocation]:
    """Name what a native plan has seen. What neither a result keeps nor the operator gave back is left out."""
    listed = list(seen)
    count: dict[int, int] = {}
    for instruction, *_ in listed:
        count[instruction] = count.get(instruction, 0) + 1
    found = []
    for index, nbytes, occurrence, results, freed, twins in listed:
        if not results and not freed:
            continue
        handle = graph.handles[index]
        keepers = [_result(handle, value, position) for value, position in results]
        operands = _operand_names(handle)
        found.append(
            Allocation(
                index,
                nbytes,
                occurrence,
                tuple(n for n in keepers if n is not None),
                tuple((p, operands[p]) for p in twins if p in operands),
                count[index] == 1,
            )
        )
    return found


def _result(handle: OpHandle, value: int, position: int) -> str | None:
    out = handle.op.outputs[value] if value < len(handle.op.outputs) else None
    return out[position] if isinstance(out, tuple) else out


def _operand_names(handle: OpHandle) -> dict[int, str]:
    """The variables that are operands of their own, by position in the operator's schema."""
    named: dict[str, Arg] = dict(handle.op.kwargs)
    found = {}
    for position, argument in enumerate(schema_of(resolve(handle.op)).arguments):
        value = handle.op.args[position] if position < len(handle.op.args) else named.get(argument.name)
        if isinstance(value, Ref):
            found[position] = value.name
    return found


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """One lowered plan. All but `observed_bytes` are 0 until its second run.

    `arena_bytes`: what its temporaries need with sharing, `separate_bytes` without, `live_bytes`: at once if operators
    run in order, the least that any plan needs. `observed_bytes`: the most that the first, unplanned run had at once.
    `planned`: allocations of a run that have a place; `missed`: of those, not placed in the last run, because a size
    was another one or what lay there was still in use; `unplanned`: other allocations of the last run (fetches,
    sizes that follow the data). `unplanned_peak_bytes`: the most that these held at once. `abandoned`: places given up
    because an operator has kept a tensor there.
    """

    rows: tuple[str, ...]
    arena_bytes: int
    separate_bytes: int
    live_bytes: int
    observed_bytes: int
    planned: int
    in_place: int
    missed: int
    unplanned: int
    unplanned_peak_bytes: int
    abandoned: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """An executor. `temporaries`: those that hold memory now, between runs.

    `steady_bytes`: memory of arenas between runs, also what only a tensor holds that an operator has kept;
    `peak_bytes`: the most during a run so far, arenas and what did not lie in them, runs of plans included that are
    gone. `parameter_bytes`: persistable tensors of the scope that plans are bound to;
    `copy_bytes`: copies of them for other replicas. `steps`: runs that went well.
    """

    steps: int
    temporaries: int
    steady_bytes: int
    peak_bytes: int
    parameter_bytes: int
    copy_bytes: int
    plans: tuple[PlanStatistics, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers, for JSON."""
        return {**asdict(self), "plans": [asdict(p) for p in self.plans]}


def statistics(temporaries: Temporaries, plans: Sequence[Lowered]) -> Statistics:
    """Count. Cost: looks into every slot of every plan, so not for every step."""
    described = tuple(_of_plan(p) for p in plans)
    held = [t for p in plans for t in _held(p)]
    parameters, copies = _persistables(plans)
    arenas, peak = temporaries.arena_bytes, temporaries.peak_bytes
    return Statistics(temporaries.runs, len(held), arenas, peak, parameters, copies, described)


def _of_plan(lowered: Lowered) -> PlanStatistics:
    now, buffers = lowered.plan.memory(), lowered.memory.buffers
    return PlanStatistics(
        tuple(", ".join(f"{k}={v}" for k, v in b.items() if k != "seed") for b in lowered.shares.bindings),
        buffers.arena_bytes if buffers else 0,
        buffers.separate_bytes if buffers else 0,
        buffers.live_bytes if buffers else 0,
        lowered.memory.observed_bytes if buffers else now["unplanned_peak"],
        now["planned"],
        sum(o >= 0 for o in buffers.operand_of) if buffers else 0,
        now["planned"] - now["handed_out"],
        now["unplanned"],
        now["unplanned_peak"] if buffers else 0,
        now["abandoned"],
    )


def _held(lowered: Lowered) -> list[str]:
    """Variables that a run has made and that still have their memory: no feed, no persistable."""
    made = {n for handle in lowered.graph.handles for n in handle.makes()}
    lasting = {k for k, v in lowered.graph.variables.items() if v.persistable or v.feed}
    return [n for n in made - lasting if lowered.plan.get(lowered.slots[n]) is not None]


def _persistables(plans: Sequence[Lowered]) -> tuple[int, int]:
    """Bytes of the tensors that the plans are bound to: replica 0's and shared ones, and copies; each once."""
    mine: dict[int, int] = {}
    copies: dict[int, int] = {}
    for lowered in plans:
        for key, variable in lowered.graph.variables.items():
            if not variable.persistable or variable.storage != key:
                continue
            tensor = lowered.plan.get(lowered.slots[key])
            if tensor is not None:
                where = copies if variable.replica > 0 else mine
                where[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(mine.values()), sum(copies.values())
