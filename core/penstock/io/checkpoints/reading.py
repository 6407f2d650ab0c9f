"""Finding the newest checkpoint that is whole.

Every byte is checked against sizes and digests before anything is restored.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.errors import UserError
from penstock.io.checkpoints.layout import DAMAGED, REPLACED, Place, newest_first
from penstock.io.checkpoints.record import MANIFEST, PROGRAM, RankState, Record, parse, rank_file, rank_state
from penstock.io.saves.files import not_read, read_tensors, verify
from penstock.io.saves.manifest import Damaged, check_wanted

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint whose every byte is what was written."""

    path: Path
    record: Record

    def program_text(self) -> str:
        """Return what its program was (`fingerprint.normal_text`)."""
        return (self.path / PROGRAM).read_text(encoding="utf-8")

    def ranks(self) -> list[RankState]:
        """Return the states of its ranks."""
        paths = [self.path / rank_file(rank) for rank in range(self.record.num_ranks)]
        return [rank_state(path.read_text(encoding="utf-8"), str(path)) for path in paths]

    def values(
        self, wanted: Mapping[str, tuple[str, tuple[int, ...]]], created: Callable[[str], str]
    ) -> dict[str, torch.Tensor]:
        """Return the values of all of `wanted` (dtype and shape by name). Raises UserError if they do not fit."""
        stored = {v.name: (shard.file, v) for shard in self.record.shards for v in shard.variables}
        check_wanted(wanted, {name: v for name, (_, v) in stored.items()}, str(self.path), created)
        found: dict[str, torch.Tensor] = {}
        for shard in self.record.shards:
            mine = {v.name: v for v in shard.variables if v.name in wanted}
            found |= read_tensors(self.path / shard.file, mine)
        return found


def opened(path: Path) -> StoredCheckpoint:
    """Return a checkpoint after reading all of it. Raises Damaged naming the absent or damaged file.

    UserError for one that cannot be read now (no right to, an error of the disk), or is of another Penstock.
    """
    manifest = path / MANIFEST
    try:
        text = manifest.read_bytes()
    except OSError as error:
        raise not_read(manifest, "cannot be read", error) from error
    record = parse(text, str(manifest))
    for stored in record.files:
        verify(path / stored.name, stored)
    return StoredCheckpoint(path, record)


def places(folder: Path) -> list[Place]:
    """Return the checkpoints of a folder, newest first. One that was to be replaced, and was not, is one of them."""
    names = {path.name.removeprefix(REPLACED) for path in folder.iterdir()} if folder.is_dir() else set()
    return newest_first(sorted(names))


def _path_of(folder: Path, place: Place) -> Path:
    path = folder / place.name
    aside = folder / (REPLACED + place.name)
    return aside if aside.is_dir() and not path.is_dir() else path


def _opened_at(folder: Path, place: Place) -> StoredCheckpoint:
    """Open a checkpoint; if it was put back meanwhile (`settle_replaced`), by its name then. Raises as `opened`."""
    path = _path_of(folder, place)
    try:
        return opened(path)
    except Damaged:
        again = _path_of(folder, place)
        if again == path:
            raise
        return opened(again)


def newest(folder: Path, *, strict: bool, sets_aside: bool) -> StoredCheckpoint | None:
    """Return the newest checkpoint that is whole; None if there is none at all.

    A damaged one is logged, and the one before it tried; `sets_aside`: it gets another name, so that it is
    not met again. Raises UserError for a damaged one if `strict`, and if all are damaged; and for one that cannot be
    read, which may be whole: nothing is set aside for that, nor an older one taken.
    """
    found = places(folder)
    damaged: list[str] = []
    for place in found:
        path = folder / place.name
        try:
            return _opened_at(folder, place)
        except Damaged as error:
            if strict:
                raise
            damaged.append(str(error))
            _log.warning("the checkpoint %s is damaged and is passed over: %s", path, error)
            if sets_aside and len(damaged) < len(found):  # the last one stays, to be named again at the next start
                _set_aside(path)
        except UserError as error:
            raise UserError(
                f"the checkpoint {path} cannot be restored, and is not known to be damaged: {error}. Mend the cause "
                "and start again; to go on from the one before, move this folder away",
                file=str(path),
            ) from error
    if damaged:
        raise UserError(
            f"{folder} has {len(damaged)} checkpoints, and none is whole: {'; '.join(damaged)}. To begin anew, give "
            "another folder or remove them",
            file=str(folder),
        )
    return None


def _set_aside(path: Path) -> None:
    aside = path.with_name(DAMAGED + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
