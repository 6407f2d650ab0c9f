"""The exchange with the replicas of other processes, as operator handles: one vocabulary for builder and passes.

A step begins with a meeting of the ranks (`step.ranks`): what they say of it (rows, who has ended, which exchanges)
lies in STEP, by which every exchange weighs: a rank counts as many times as it has rows, so that the result is that of
one process with all rows. MINE is what this rank says; an executor sets it before each step. The meeting needs nothing
that the step computes, so it is over long before the first gradient is there.
Every handle here waits for other processes: it belongs on a thread that may wait, and its order over all ranks is made
by `passes/exchanges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.graph.ssa import SHARED, GraphBuilder, OpHandle, Physical
from penstock.program.ir import Arg, Operator, Ref, Role

MINE, STEP = "@MINE@", "@STEP@"
SUMS = frozenset({"penstock.ring_all_reduce_.default", "penstock.group_all_reduce_.default"})
GATHERS = frozenset({"penstock.ring_gather.default", "penstock.group_gather.default"})
BEGINS = frozenset({"penstock.ring_step.default", "penstock.group_step.default"})
EXCHANGES = ("step.ranks", "across.", "fused_across.")
"""How the names of their operators begin."""
WAITS = SUMS | GATHERS | BEGINS
"""Types of the operators that wait for other processes. The name of the ring is their last argument."""


@dataclass(frozen=True, slots=True)
class Across:
    """How a graph exchanges with other processes.

    `kind`: which operators do it, `ring` or `group`; `rings`: names of exchanges that may be under way at a time.
    `mean`: weigh by rows (else gradients are sums). `parameters`: average parameters after the updates, not gradients.
    """

    kind: Literal["ring", "group"]
    rings: tuple[str, ...]
    mean: bool = True
    parameters: bool = False

    def type(self, name: str) -> str:
        """Return the type of an operator: 'penstock.ring_gather.default'."""
        return f"penstock.{self.kind}_{name}.default"


def begin_step(builder: GraphBuilder, across: Across) -> None:
    """Add the meeting. Both variables outlive the step as feeds do: the executor sets one and reads the other."""
    for name in (MINE, STEP):
        builder.declare(Physical(name, name, SHARED, name, False, True))
    op = Operator("step.ranks", across.type("step"), (Ref(MINE), across.rings[0]), (STEP,), role=Role.DIST)
    builder.add("gather", op, SHARED, 0)


def exchange_sums(builder: GraphBuilder, across: Across, name: str, keys: tuple[str, ...], replicas: int) -> OpHandle:
    """Add the sum over all ranks of a dense variable, which `replicas` replicas of this process hold as `keys`."""
    args = (tuple(Ref(k) for k in keys), replicas, Ref(STEP), across.mean, across.rings[0])
    op = Operator(f"across.{name}", across.type("all_reduce_"), args, (), writes=keys, role=Role.DIST)
    return builder.add("all_reduce", op, SHARED, 0)


def exchange_rows(builder: GraphBuilder, across: Across, parts: tuple[str, str], own: Sequence[str]) -> OpHandle:
    """Add the gathering of a sparse gradient's rows and values of all ranks; `own`: the keys of this rank's."""
    for part in parts:
        builder.declare(Physical(part, part, SHARED, part, False, False))
    args: tuple[Arg, ...] = (*(Ref(k) for k in own), Ref(STEP), across.mean, across.rings[0])
    op = Operator(f"across.{parts[1]}", across.type("gather"), args, parts, role=Role.DIST)
    return builder.add("gather", op, SHARED, 0)
