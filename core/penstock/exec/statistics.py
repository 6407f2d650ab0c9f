"""What an executor holds and has done: plain numbers for reports and tests. Bytes are of CPU memory unless stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.exec.lowering import Lowered
from penstock.exec.temporaries import Temporaries


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
