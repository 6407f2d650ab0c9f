"""A DataParallel's part in training with other processes: announcement of each step, and steps without rows.

Before the first step every rank takes rank 0's persistable variables and random seed. `signature` is a number that two
ranks share when they exchange the same gradients in the same order; a step in which they differ is an error.
Owner: the thread that runs steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.distributed.collective import COLLECTIVE, this_process
from penstock.distributed.exchange_ops import ENDED, ROWS, SIGNATURE
from penstock.errors import OperatorError, PenstockError, Unavailable
from penstock.exec.feeding import resolved_seed
from penstock.exec.lowering import Lowered
from penstock.exec.strategies import BuildStrategy
from penstock.graph.across import EXCHANGES, GATHERS, MINE, STEP, SUMS, Across
from penstock.graph.ssa import Graph
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.program.pruning import counted_as
from penstock.scope import Scope, tensor_of


class ExchangeGroup(Protocol):
    """The trainers of the job (`penstock.distributed.collective`), as an executor sees them."""

    @property
    def kind(self) -> str: ...

    @property
    def rings(self) -> tuple[str, ...]: ...

    def device_rings(self) -> tuple[str, ...]: ...

    @property
    def cores(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def check(self) -> None: ...

    def broadcast(self, tensors: list[torch.Tensor]) -> None: ...

    def take_part(self, signature: int, idle: Callable[[torch.Tensor], None]) -> None: ...

    def note(self, step: torch.Tensor, steps: int) -> None: ...

    def join(self) -> None: ...

    def step_failed(self, error: BaseException) -> None: ...

    def why(self) -> Unavailable | None: ...


@dataclass(frozen=True, slots=True)
class Trainers:
    """The processes that a program is trained by, and what they exchange: gradients, or parameters (local SGD).

    `on_gpu`: each computes on a GPU of its own, and they exchange by NCCL.
    """

    group: ExchangeGroup
    parameters: bool = False
    on_gpu: bool = False

    def across(self, *, mean: bool) -> Across:
        """Return how a graph exchanges with them. With GPUs all trainers come here at once, and meet by NCCL."""
        if self.on_gpu:
            return Across("group", self.group.device_rings(), mean, self.parameters)
        kind = "ring" if self.group.kind == "ring" else "group"
        return Across(kind, self.group.rings, mean, self.parameters)  # type: ignore[arg-type]  # one of the two

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.group.rank


def trainers_of(program: Program, build: BuildStrategy, num_trainers: int = 1, trainer_id: int = 0) -> Trainers | None:
    """Return the trainers that a program, or an executor's arguments and strategy, speak of; None: it is the only one.

    Arguments other than 1 and 0 stand above the strategy's. Meets the others if they have not met.
    """
    number = num_trainers if num_trainers != 1 else build.num_trainers
    mine = trainer_id if trainer_id != 0 else build.trainer_id
    marked = mark_of(program)
    if marked is None and number == 1:
        return None
    if marked is not None:
        arguments: Any = marked.args
        mode, rank, endpoints, num_rings, inter = arguments
        group = this_process.meet(rank, endpoints, num_rings=num_rings, inter=inter)
        return None if group is None else Trainers(group, parameters=mode == "local_sgd")
    inter_ranks = build.hierarchical_allreduce_inter_nranks if build.use_hierarchical_allreduce else 0
    group = this_process.group_of(
        number, mine, build.trainers_endpoints, num_rings=build.nccl_comm_num, inter=inter_ranks
    )
    return Trainers(group)


def mark_of(program: Program) -> Operator | None:
    """Return the operator that marks a program which several processes train; it is the first one."""
    first = program.operators[0] if program.operators else None
    return first if first is not None and first.type == COLLECTIVE else None


class SharedSteps:
    """The steps of one program that all trainers make together."""

    def __init__(self, trainers: Trainers, program: Program, idle: Callable[[torch.Tensor], None]) -> None:
        self._trainers, self._program, self._idle = trainers, program, idle
        self._group = trainers.group
        self._begun = False
        self._mine = torch.zeros(3, dtype=torch.int64)
        self._steps = 0

    def begin(self, scope: Scope) -> None:
        """Take rank 0's values before the first step; raise Unavailable if the others are gone."""
        self._group.check()
        if self._begun:
            return
        program = self._program
        names = sorted(
            n for n, v in program.variables.items() if v.persistable and v.storage == n and not v.distributed
        )
        seed = torch.tensor([resolved_seed(program)])
        self._group.broadcast([*(tensor_of(scope, program, name) for name in names), seed])
        if not program.seed:
            counted_as(program).fresh_seed = int(seed)
        scope.written_by(self)
        self._begun = True

    def announce(self, lowered: Lowered, rows: Sequence[int]) -> int:
        """Put the row count and signature of this rank's step into place; return the first global row of this rank."""
        total = sum(rows)
        if lowered.signature < 0:
            lowered.signature = signature(lowered.graph, self._program)
        self._mine[ROWS], self._mine[SIGNATURE] = total, lowered.signature
        self.offer(lowered.signature)
        lowered.plan.set(lowered.slots[MINE], self._mine)
        return self._trainers.rank * total

    def offer(self, signature: int) -> None:
        """Take part without rows, from now on, in steps that have this signature, when the data here has ended."""
        self._group.take_part(signature, self._without_rows)

    def join(self) -> None:
        """Take part without rows until the data of all has ended. Raises Unavailable."""
        self._group.join()

    def _without_rows(self, step: torch.Tensor) -> None:
        self._idle(step)
        for callback in list(self._program.after_steps_without_rows.values()):
            callback()

    def done(self, lowered: Lowered) -> None:
        """Note the ranks whose data has ended by the step that is over."""
        step = lowered.plan.get(lowered.slots[STEP])
        if step is not None and bool(step[:, ENDED].any()):
            self._group.note(step, self._steps)
        self._steps += 1

    def failed(self, error: PenstockError) -> Unavailable | None:
        """Report an unfinished step to the others; return the error that names a lost rank, if that is why."""
        in_exchange = not isinstance(error, OperatorError) or str(error.fields.get("operator", "")).startswith(
            EXCHANGES
        )
        found = self._group.why() if in_exchange else None
        if found is None:
            self._group.step_failed(error)
        return found


def signature(graph: Graph, program: Program) -> int:
    """Return a hash, 63 bits, of which tensors are exchanged, in which order and how many at a time."""
    digest = hashlib.sha256()
    for handle in graph.handles:
        if handle.op.type not in SUMS | GATHERS:
            continue
        names = dict.fromkeys(graph.variables[k].name for k in (*handle.op.writes, *handle.makes()))
        for name in names:
            var = program.variables[name]
            fixed = [d for d in var.shape if isinstance(d, int)]
            digest.update(f"{name} {var.dtype} {var.kind} {math.prod(fixed)};".encode())
        digest.update(f"{handle.op.type}|".encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
