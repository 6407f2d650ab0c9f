"""Writing a checkpoint so that a process which dies at any moment leaves those before it, and no half of a new one.

Everything is written into a folder whose name says that it is not finished, and brought to the disk; the manifest comes
last; then one rename, which only the newest attempt may make (`fence`), commits it. What is needed no more is removed
after that, and is renamed first, so that what has a checkpoint's name is whole.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.errors import UserError
from penstock.io.checkpoints import server_parts, shards
from penstock.io.checkpoints.clearing import delete_removed, out_of_the_way, settle_replaced
from penstock.io.checkpoints.fence import Fence
from penstock.io.checkpoints.layout import (
    REPLACED,
    Best,
    Place,
    newest_first,
    to_remove,
    unfinished,
)
from penstock.io.checkpoints.record import MANIFEST, PROGRAM, Kind, Record, Shard, parse, rank_file, render
from penstock.io.saves.files import digest_of, flush
from penstock.io.saves.manifest import ServersPart, StoredFile

PHASES = ("begin", "values", "ranks", "program", "manifest", "commit", "replace", "committed", "removal", "removed")
"""What `at_phase` is called with, before each: "values" for each shard; "replace" where the step has a checkpoint of
this attempt already; "committed" after the rename, before it is sure to be on disk; "removed" after all needless ones
have lost their names, before their files go."""

AtPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the latest `keep`, and the best `keep_best` by the metric that was given to them."""

    keep: int = 3
    keep_best: int = 0
    best: Best = "min"


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written. `tensors`: contiguous, in the processor's memory, changed by nobody. `ranks`: a text for each.

    `servers`: their part lies in the unfinished folder already.
    """

    kind: Kind
    step: int
    fingerprint: str
    text: str
    tensors: Mapping[str, torch.Tensor]
    ranks: Sequence[str]
    metric: float | None = None
    servers: ServersPart | None = None


class Writer:
    """Writes checkpoints of one attempt into its folder. One at a time."""

    def __init__(
        self, fence: Fence, retention: Retention, at_phase: AtPhase, shard_bytes: int = shards.SHARD_BYTES
    ) -> None:
        self.folder, self._fence, self._retention = fence.folder, fence, retention
        self.at_phase, self._shard_bytes = at_phase, shard_bytes

    def place(self, step: int) -> Place:
        """Return where the checkpoint of a step will lie."""
        return Place(self._fence.claim.number, step)

    def _work(self, place: Place) -> Path:
        return self.folder / unfinished(place, self._fence.claim.token)

    def begin(self, step: int) -> Path:
        """Make the unfinished folder of a step and return it. Raises OSError."""
        work = self._work(self.place(step))
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        return work

    def abandon(self, step: int) -> None:
        """Remove the unfinished folder of a step that comes to nothing. What cannot be removed is, at the next start.

        It is renamed first: a server that still writes finds its folder gone, and ends.
        """
        with contextlib.suppress(OSError):
            work = self._work(self.place(step))
            if work.exists():
                out_of_the_way(work)
                delete_removed(self.folder)

    def write(self, contents: Contents) -> Path:
        """Write and commit a checkpoint; return its folder.

        Raises OSError, StaleAttempt, and PeerError for an unfinished part of a server, with nothing committed.
        """
        place = self.place(contents.step)
        work = self._work(place)
        try:
            self.at_phase("begin")
            if contents.servers is None:
                self.begin(contents.step)
            self._fill(work, contents)
            self._commit(work, place)
        except OSError:
            self._fence.check()  # a newer attempt has removed what this one was writing
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.at_phase("removed")
        delete_removed(self.folder)
        return self.folder / place.name

    def _fill(self, work: Path, contents: Contents) -> None:
        files: list[StoredFile] = []
        listed: list[Shard] = []
        for number, part in enumerate(shards.shares(contents.tensors, self._shard_bytes)):
            self.at_phase("values")
            name = f"values-{number:05d}.safetensors"
            files.append(shards.write(work / name, part))
            listed.append(Shard(name, shards.described(part)))
        self.at_phase("ranks")
        files += [_write_text(work / rank_file(rank), text) for rank, text in enumerate(contents.ranks)]
        self.at_phase("program")
        files.append(_write_text(work / PROGRAM, contents.text))
        if contents.servers is not None:
            files += server_parts.files_of(work, contents.servers)
        claim = self._fence.claim
        record = Record(
            contents.kind, contents.step, claim.number, len(contents.ranks), contents.fingerprint, tuple(files),
            tuple(listed), claim.job, claim.epoch, contents.metric, contents.servers,
        )  # fmt: skip
        self.at_phase("manifest")
        _write_text(work / MANIFEST, render(record))
        flush(work)

    def _commit(self, work: Path, place: Place) -> None:
        self.at_phase("commit")
        target = self.folder / place.name
        with self._fence.committing():
            if target.exists():  # the same step again, of a process that was started again in its place
                target.rename(self.folder / (REPLACED + place.name))
                self.at_phase("replace")
            work.rename(target)
            self.at_phase("committed")
            flush(self.folder)
            self.at_phase("removal")
            self._remove_needless()

    def _remove_needless(self) -> None:
        """Take their names from those that are needed no more. The fence is held."""
        places = newest_first([path.name for path in self.folder.iterdir()])
        retention = self._retention
        found = [(place, metric_of(self.folder / place.name)) for place in places]
        for place in to_remove(found, keep=retention.keep, keep_best=retention.keep_best, best=retention.best):
            out_of_the_way(self.folder / place.name)
        settle_replaced(self.folder)


def metric_of(path: Path) -> float | None:
    """Return the metric of a checkpoint; None for one without, or with a damaged manifest."""
    try:
        return parse((path / MANIFEST).read_bytes(), str(path)).metric
    except (OSError, UserError):
        return None


def _write_text(path: Path, text: str) -> StoredFile:
    path.write_text(text, encoding="utf-8")
    flush(path)
    return StoredFile(path.name, path.stat().st_size, digest_of(path))
