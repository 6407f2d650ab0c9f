"""From a checkpoint back into a scope, on every rank of a job.

Everything is read and checked before anything changes. Ranks of a collective job get what rank 0 has read; trainers of
a job with servers read for themselves, and ask the servers whether they have found the same. Pure functions decide
where readers go on if the job goes on with another number of trainers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.dataset import Dataset
from penstock.dataset.shuffles import is_between
from penstock.errors import PenstockError, UserError
from penstock.io.checkpoints import fingerprint
from penstock.io.checkpoints.reading import StoredCheckpoint, newest
from penstock.io.checkpoints.record import Kind, RankState, rank_state
from penstock.io.checkpoints.server_parts import copy_of
from penstock.io.checkpoints.team import Team
from penstock.io.checkpoints.values import empty, put, put_generators, wanted
from penstock.program.program import Program
from penstock.scope import Scope


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored. `step`: how many steps the training has made, of a job with parameter servers this trainer;
    `passes`: of those over the data that it has finished. `position`: of this rank's reader; None at the beginning of a
    pass (a data set in memory that was shuffled has one there, too), or if the job has another number of ranks now and
    they stood at different places: `positions` has those of all. `metric`: what the save was given.
    """

    path: Path
    step: int
    passes: int = 0
    position: Any = None
    positions: tuple[Any, ...] = ()
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint goes. `text`: what the program's fingerprint is of."""

    program: Program
    text: str
    scope: Scope
    dataset: Dataset | None


@dataclass(frozen=True, slots=True)
class _Summary:
    """What rank 0 sends of a checkpoint; `states`: a text for each rank that it was saved by."""

    path: str
    step: int
    metric: float | None
    fingerprint: str
    states: list[str]


def restore(directory: Path, team: Team, target: Target, *, strict: bool) -> Restored | None:
    """Restore the newest checkpoint that is whole; see `CheckpointManager.restore`."""
    if team.kind == "collective":
        return _together(directory, team, target, strict)
    found = newest(directory, strict=strict, sets_aside=team.rank == 0)
    values = {} if found is None else _values(found, target, team.kind)
    team.restores(copy_of(found))
    return None if found is None else _take(_summary(found), values, team, target)


def _together(directory: Path, team: Team, target: Target, strict: bool) -> Restored | None:
    if team.rank:
        content = json.loads(team.share(""))
        if content is None:
            return None
        if "error" in content:
            raise UserError(f"rank 0 cannot restore: {content['error']}")
        said = _Summary(**content)
        if said.fingerprint != fingerprint.fingerprint(target.text):
            raise UserError(f"this rank trains another program than rank 0, which restores {said.path}", file=said.path)
        values = empty(target.program, wanted(target.program, team.kind, set()))
    else:
        try:
            found = newest(directory, strict=strict, sets_aside=True)
            values = {} if found is None else _values(found, target, team.kind)
            summary = None if found is None else _summary(found)
        except (PenstockError, OSError) as error:
            team.share(json.dumps({"error": str(error)}))
            raise
        team.share(json.dumps(None if summary is None else _plain(summary)))
        if summary is None:
            return None
        said = summary
    team.broadcast([values[name] for name in sorted(values)])
    return _take(said, values, team, target)


def _values(found: StoredCheckpoint, target: Target, kind: Kind) -> dict[str, torch.Tensor]:
    """Return the values of a checkpoint. Raises UserError if it is not of this program."""
    record = found.record
    if (record.kind == "pserver") != (kind == "pserver"):
        raise UserError(
            f"the checkpoint {found.path} is of a training of kind {record.kind!r}, and this one is {kind!r}: what "
            "parameter servers have written can be restored by such a job alone",
            file=str(found.path), got=record.kind, expected=kind,
        )  # fmt: skip
    if record.fingerprint != fingerprint.fingerprint(target.text):
        fingerprint.check_same(target.text, found.program_text(), str(found.path))
    stored = {v.name for shard in record.shards for v in shard.variables}
    return found.values(wanted(target.program, kind, stored), lambda name: target.program.variables[name].source)


def _summary(found: StoredCheckpoint) -> _Summary:
    record = found.record
    return _Summary(str(found.path), record.step, record.metric, record.fingerprint, [s.text() for s in found.ranks()])


def _plain(said: _Summary) -> Mapping[str, Any]:
    return {name: getattr(said, name) for name in _Summary.__slots__}


def _take(said: _Summary, values: Mapping[str, torch.Tensor], team: Team, target: Target) -> Restored:
    states = [rank_state(text, said.path) for text in said.states]
    mine = states[team.rank] if team.rank < len(states) else states[0]
    all_positions = tuple(state.position for state in states)
    position = of_rank(all_positions, team.rank, team.num_ranks)
    if target.dataset is not None and len(states) != team.num_ranks and not all(map(is_between, all_positions)):
        position = of_files(all_positions, target.dataset.position())
    if target.dataset is not None and position is not None:
        target.dataset.set_position(position)
    put(values, target.scope)
    _go_on(target, mine if mine.is_known else states[0])
    passes, step = passes_of(states, team.rank, team.num_ranks), said.step
    if team.kind == "pserver":  # ranks of a collective job make each step together
        step = steps_of(states, team.rank, team.num_ranks, step)
    return Restored(Path(said.path), step, passes, position, all_positions, said.metric)


def _go_on(target: Target, state: RankState) -> None:
    target.scope.set_steps(target.program, state.program_steps)
    if target.program.seed == 0:
        target.program.fresh_seed = state.seed
    put_generators(state.generators)


def of_rank(positions: Sequence[Any], rank: int, num_ranks: int) -> Any:
    """Return the position of a rank; None if the job had another number of ranks, which stood at different places."""
    if len(positions) == num_ranks:
        return positions[rank]
    return positions[0] if all(one == positions[0] for one in positions) else None


def passes_of(states: Sequence[RankState], rank: int, num_ranks: int) -> int:
    """Return how many passes over its data a rank has finished: ranks whose data is unequal differ.

    Of one whose state is not known, or if the job had another number of ranks: those that all had finished, so that
    no rank leaves out what was left of a pass.
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

    Each file is where its reader has left it. Raises UserError for a file that several had read, or none had,
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
                    f"several of the {len(positions)} readers of the checkpoint had read {place[0]!r}, so it is "
                    "unknown which lines are left of it for another number of trainers. Restore without the data set",
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
