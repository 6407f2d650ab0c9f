"""Participants of a checkpoint: this process alone, the ranks of a collective job, or a job's trainers and servers.

Each rank hands in its own state, a text; the first one writes them, and the values that all have. A team decides when a
checkpoint is due for all of its ranks, brings their texts to the first, and sends the others its outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from penstock.distributed.collective import this_process
from penstock.errors import SpecError
from penstock.exec.strategies import BuildStrategy
from penstock.exec.trainers import mark_of, trainers_of
from penstock.identity import JobIdentity
from penstock.io.checkpoints.record import Collect, Kind
from penstock.io.checkpoints.schedule import Schedule
from penstock.io.checkpoints.values import of_each_rank
from penstock.io.saves.manifest import ServersPart
from penstock.program.program import Program
from penstock.ps.settings import Copy
from penstock.serving.remote_use import descriptors


class Team(Protocol):
    """See the module. Methods are called on the training thread, but for `outcome` and a `Collect`."""

    @property
    def kind(self) -> Kind: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def is_due(self, schedule: Schedule, steps: int) -> bool:
        """Whether all ranks save now, after `steps` steps of this one; all come to the same answer."""

    def hand_in(self, mine: str) -> Collect:
        """Give this rank's text for the next checkpoint. Raises what the first rank has met since the last call."""

    def save_servers(self, work: Callable[[], Path]) -> ServersPart | None:
        """Have servers write their part into the unfinished folder that `work` makes, on rank 0. After `hand_in`."""

    def outcome(self, error: str) -> None:
        """Send the others the outcome of the checkpoint: '' if it was written. First rank."""

    def restores(self, copy: Copy) -> None:
        """Announce what this rank is about to restore. Raises OtherCheckpoint if servers began from another one."""

    def share(self, text: str) -> str:
        """Return the first rank's text, on every rank."""

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Give every rank the tensors of the first one."""

    def close(self, last: str) -> None:
        """End, with this rank's last text. Waits until what it has handed in is written, and raises if it is not."""


class Alone:
    """One process."""

    kind: Kind = "local"
    rank = 0
    num_ranks = 1

    def is_due(self, schedule: Schedule, steps: int) -> bool:
        return schedule.by_steps(steps) or schedule.by_time()

    def hand_in(self, mine: str) -> Collect:
        return lambda: [mine]

    def save_servers(self, work: Callable[[], Path]) -> ServersPart | None:
        return None

    def outcome(self, error: str) -> None:
        return

    def restores(self, copy: Copy) -> None:
        return

    def share(self, text: str) -> str:
        return text

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        return

    def close(self, last: str) -> None:
        return


def check_same(program: Program, mode: object) -> None:
    """Raise SpecError for a training after whose steps ranks have values that differ: rank 0's stand for all."""
    own = of_each_rank(program) if mode == "local_sgd" else []
    if own:
        raise SpecError(
            "collective_mode='local_sgd' cannot be saved and go on with this optimizer: each trainer has "
            f"{own[0]!r} of its own ({len(own)} such variables), and a checkpoint holds those of trainer 0 alone. Use "
            "SGD, which keeps nothing, or collective_mode='grad_allreduce', where all trainers have the same",
            got=own[0],
        )


def team_of(program: Program, folder: Path) -> Team:
    """Return the team of a program that this process trains. `folder`: of the checkpoints.

    Meets the other trainers of a collective job if its program names them. Raises SpecError where only the
    environment does, and they have not met; and for ranks whose values differ.
    """
    if descriptors(program):
        from penstock.io.checkpoints.trainers_team import TrainersTeam  # loads a client of servers

        return TrainersTeam(program, folder)
    mark = mark_of(program)
    if mark is not None:
        check_same(program, mark.args[0])
        trainers_of(program, BuildStrategy())
    if this_process.group is not None:
        from penstock.io.checkpoints.ranks_team import RanksTeam  # loads torch.distributed

        return RanksTeam(this_process.group)
    found = JobIdentity.of_meeting()
    if found is not None and found.num_trainers > 1:
        raise SpecError(
            f"this process is trainer {found.index} of {found.num_trainers}, but has not met the others, so it cannot "
            "save or restore with them. Transpile the program, or make the ParallelExecutor, before. If each process "
            "trains independently, take PADDLE_TRAINER_ENDPOINTS and WORLD_SIZE out of its environment"
        )
    return Alone()
