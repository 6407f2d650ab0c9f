"""Participants of a checkpoint: this process alone, the ranks of a collective job, or a job's trainers and servers.

Each rank hands in its own state, a text; the first one writes them, and the values that all have. A team decides when a
checkpoint is due for all of its ranks, brings their texts to the first, and sends the others its outcome.
"""

from __future__ import annotations

from pathlib import Path

from penstock.distributed.collective import this_process
from penstock.errors import SpecError
from penstock.exec.strategies import BuildStrategy
from penstock.exec.trainers import mark_of, trainers_of
from penstock.identity import JobIdentity
from penstock.io.checkpoints.team import Team
from penstock.io.checkpoints.values import of_each_rank
from penstock.program.program import Program
from penstock.serving.remote_use import descriptors


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
    return Team()
