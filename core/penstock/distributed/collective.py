"""This process as a part of a collective job: its group of trainers, met once, and the operators that ask for it.

`gen_nccl_id` (Fluid's name) stands in a startup program: when it runs, the trainers meet. `collective` marks a program
that they train together. Importing this module registers these operators and those that exchange.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.distributed.exchange_ops import EXCHANGE_NAMES, library
from penstock.distributed.ranks import Ranks, ranks_in, ranks_of
from penstock.errors import SpecError
from penstock.identity import JobIdentity, checked_endpoints

if TYPE_CHECKING:  # loads torch.distributed, which one trainer does without
    from penstock.distributed.trainer_group import TrainerGroup

GEN_ID = "penstock.gen_nccl_id.default"
COLLECTIVE = "penstock.collective.default"
_MOST_RINGS = 64  # each has a thread that waits, of which an engine has a limited number


class CollectiveProcess:
    """A process of a job. `group`: its trainers, once a startup program or an executor has met them. Thread-safe."""

    def __init__(self) -> None:
        self.group: TrainerGroup | None = None
        self._making = threading.Lock()

    def form(self, ranks: Ranks) -> TrainerGroup | None:
        """Meet the other trainers, or return the group if they have met. None: there is one trainer.

        Blocks until all are there. Raises Unavailable naming the absent ranks; SpecError for a second, different group.
        """
        if ranks.num_ranks == 1:
            return None
        if ranks.num_rings > _MOST_RINGS:
            raise SpecError(f"nccl_comm_num is {ranks.num_rings}; expected at most {_MOST_RINGS}", got=ranks.num_rings)
        from penstock.distributed.trainer_group import TrainerGroup  # loads torch.distributed, see above

        with self._making:
            if self.group is None:
                self.group = TrainerGroup(ranks)
            known = self.group.ranks
            if (known.rank, known.num_ranks, known.endpoints) != (ranks.rank, ranks.num_ranks, ranks.endpoints):
                raise SpecError(
                    f"this process is {known.name(known.rank)} of {known.num_ranks} trainers, and cannot be rank "
                    f"{ranks.rank} of {ranks.num_ranks} ({', '.join(ranks.endpoints)}) too"
                )
            return self.group

    def meet(self, rank: int, endpoints: tuple[str, ...], *, num_rings: int = 1, inter: int = 0) -> TrainerGroup | None:
        """Meet the trainers of a list; see `form`."""
        checked = checked_endpoints(",".join(endpoints), "trainers")
        return self.form(ranks_of(rank, checked, num_rings=num_rings, inter=inter))

    def group_of(
        self, num_trainers: int, trainer_id: int, endpoints: list[str], *, num_rings: int = 1, inter: int = 0
    ) -> TrainerGroup:
        """Return the group that an executor of trainer `trainer_id` of `num_trainers` is in; may meet the others.

        Where the trainers are: what the startup program met, else `endpoints`, else what a launcher has set.
        Raises SpecError, Unavailable.
        """
        group = self.group
        if group is None and endpoints:
            group = self.meet(trainer_id, tuple(endpoints), num_rings=num_rings, inter=inter)
        if group is None:
            ranks = ranks_in(JobIdentity.of_meeting())
            if ranks is None:
                raise SpecError(
                    f"num_trainers is {num_trainers}, but the trainers' endpoints are not set: run the startup "
                    'program that fluid.DistributeTranspiler made (config.mode = "nccl2"), set '
                    "BuildStrategy.trainers_endpoints, or use a launcher (PADDLE_TRAINER_ENDPOINTS; torchrun)"
                )
            group = self.form(replace(ranks, num_rings=num_rings, inter=inter))
        if group is None or (group.ranks.rank, group.ranks.num_ranks) != (trainer_id, num_trainers):
            met = "1 trainer" if group is None else f"rank {group.ranks.rank} of {group.ranks.num_ranks}"
            raise SpecError(f"num_trainers={num_trainers}, trainer_id={trainer_id}, but this process is {met}")
        check_met_so(group.ranks, num_rings, inter)
        return group


this_process = CollectiveProcess()
"""Operators have nothing but the ranks that stand in their program, and data sets not even these."""


def join() -> None:
    """Say that the data of this trainer has ended, and take part in the others' steps until theirs has.

    Then the parameters of all trainers are equal: what is saved after this is the whole job's. All may begin another
    pass. Without this call it happens at the end of the process. Raises Unavailable.
    """
    if this_process.group is not None:
        this_process.group.join()


def check_met_so(met: Ranks, num_rings: int, inter: int) -> None:
    """Raise SpecError if the trainers have met with other settings than an executor asks for (1 and 0: for none)."""
    asked = {
        "nccl_comm_num": (num_rings, met.num_rings, 1),
        "hierarchical_allreduce_inter_nranks": (inter, met.inter, 0),
    }
    for name, (wanted, found, nothing) in asked.items():
        if wanted not in (found, nothing):
            raise SpecError(
                f"BuildStrategy asks for {name} = {wanted}, but the trainers have met with {found}: set it for "
                "DistributeTranspilerConfig, too",
                got=wanted,
            )


def _gen_nccl_id(rank: int, endpoints: list[str], num_rings: int, inter: int) -> list[Tensor]:
    this_process.meet(rank, tuple(endpoints), num_rings=num_rings, inter=inter)
    return [torch.empty(0, dtype=torch.int64) for _ in range(num_rings)]


def _collective(mode: str, rank: int, endpoints: list[str], num_rings: int, inter: int) -> Tensor:
    raise RuntimeError("a program of mode 'collective' is run as a whole: with fluid.Executor, or a CompiledProgram")


_KERNELS: dict[str, tuple[str, Any]] = {
    "gen_nccl_id": ("(int rank, str[] endpoints, int num_rings, int inter) -> Tensor[]", _gen_nccl_id),
    "collective": ("(str mode, int rank, str[] endpoints, int num_rings, int inter) -> Tensor", _collective),
}
COLLECTIVE_NAMES = EXCHANGE_NAMES | set(_KERNELS)
for _name, (_schema, _kernel) in _KERNELS.items():
    library.define(_name + _schema)
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
