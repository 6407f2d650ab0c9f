"""Where the readers of a job go on, if it goes on with another number of trainers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import UserError
from penstock.io.checkpoints.record import RankState


def of_rank(positions: Sequence[Any], rank: int, num_ranks: int) -> Any:
    """Return the position of a rank; None if the job had another number of ranks, which stood at different places."""
    if len(positions) == num_ranks:
        return positions[rank]
    return positions[0] if all(one == positions[0] for one in positions) else None


def passes_of(states: Sequence[RankState], rank: int, num_ranks: int) -> int:
    """Return how many passes over its data a rank has finished: ranks whose data is unequal differ.

    Of one whose state is not known, or if the job had another number of ranks: those that all had finished, so that
    nobody leaves out what was left of a pass.
    """
    known = [state.passes for state in states if state.is_known]
    if len(states) == num_ranks and states[rank].is_known:
        return states[rank].passes
    return min(known, default=0)


def steps_of(states: Sequence[RankState], rank: int, num_ranks: int, step: int) -> int:
    """Return how many steps a trainer of servers had made, each of which has a count of its own.

    `step`: of trainer 0; of one whose count is not known, or if the job had another number of trainers.
    """
    return states[rank].steps if len(states) == num_ranks and states[rank].steps >= 0 else step


def of_files(positions: Sequence[Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of a reader whose files, those of `fresh`, were shared out differently before.

    Each file is where whoever had it has left it. Raises UserError for a file that several had read, or nobody had,
    and for readers that do not go file by file.
    """
    if fresh.get("kind") != "files" or any(not one or one.get("kind") != "files" for one in positions):
        raise UserError(
            f"the checkpoint is of {len(positions)} readers, whose data was shared out among them in memory; with "
            "another number of trainers only a QueueDataset can go on in the middle of a pass. Restore without the "
            "data set, and begin the pass anew"
        )
    places: dict[str, Sequence[Any]] = {}
    for one in positions:
        for place in one["files"]:
            if place[0] in places:
                raise UserError(
                    f"several of the {len(positions)} readers of the checkpoint had read {place[0]!r}, so nobody can "
                    "tell which lines are left of it for another number of trainers. Restore without the data set",
                    file=place[0],
                )
            places[place[0]] = place
    unknown = [place[0] for place in fresh["files"] if place[0] not in places]
    if unknown:
        raise UserError(
            f"{unknown[0]!r} was no file of the {len(positions)} readers of the checkpoint; give the trainers together "
            "the files that they had",
            file=unknown[0],
        )
    return {"kind": "files", "files": [list(places[place[0]]) for place in fresh["files"]]}
