"""Writing a checkpoint so that a process which dies at any moment leaves those before it, and no half of a new one.

Everything is written into a folder whose name marks it as unfinished, and brought to the disk; the manifest comes
last; then one rename, which only the newest attempt may make (`fence`), commits it. What is needed no more is removed
after that, and is renamed first, so that what has a checkpoint's name is whole: then no attempt takes its files for
those of a checkpoint, and a writer that was taken over, but lives, finds its folder gone. Several processes may remove
its files at once: what one of them does not get, the next start removes.

Values are safetensors files of bounded size, written by hand because the library copies each tensor while it holds the
interpreter's lock, which a training thread needs: here only headers are made under the lock, and data is written and
its digest computed from the tensors' own memory. Reading goes through the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.errors import UserError
from penstock.io.checkpoints import server_parts
from penstock.io.checkpoints.fence import Fence
from penstock.io.checkpoints.layout import (
    REMOVED,
    REPLACED,
    Best,
    Place,
    is_leftover,
    newest_first,
    to_remove,
    unfinished,
)
from penstock.io.checkpoints.record import MANIFEST, PROGRAM, Kind, Record, Shard, parse, rank_file, render
from penstock.io.saves.files import digest_of, flush
from penstock.io.saves.manifest import ServersPart, StoredFile, StoredVariable

PHASES = ("begin", "values", "ranks", "program", "manifest", "commit", "replace", "committed", "removal", "removed")
"""What `at_phase` is called with, before each: "values" for each shard; "replace" where the step has a checkpoint of
this attempt already; "committed" after the rename, before it is sure to be on disk; "removed" after all needless ones
have lost their names, before their files go."""

AtPhase = Callable[[str], None]


SHARD_BYTES = 1 << 30
"""Of a file, unless one tensor is larger."""
_CHUNK = 1 << 20  # bytes written at once
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError for a tensor of a dtype that the format lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UserError(
                f"variable {name!r} is {tensor.dtype}, which safetensors has not; expected one of "
                f"{', '.join(str(d) for d in _NAMES)}",
                variable=name,
            )


def shares(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Part tensors, in order, so that no part but one of a single tensor is larger than `limit` bytes."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Write contiguous tensors in the processor's memory, and bring them to the disk. Raises OSError."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(len(text).to_bytes(8, "little") + text, tensors):
            digest.update(piece)
            _write_all(file.fileno(), piece)
            size += len(piece)
        os.fsync(file.fileno())
    return StoredFile(path.name, size, digest.hexdigest())


def _pieces(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors.values():
        if not tensor.nbytes:
            continue
        whole = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(whole), _CHUNK):
            yield whole[begin : begin + _CHUNK]


def _write_all(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def described(tensors: Mapping[str, torch.Tensor]) -> tuple[StoredVariable, ...]:
    """Return what the manifest says of tensors."""
    return tuple(
        StoredVariable(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the latest `keep`, and the best `keep_best` by the metric that was given to them."""

    keep: int = 3
    keep_best: int = 0
    best: Best = "min"


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written. `tensors`: contiguous, in the processor's memory, unchanged. `ranks`: a text for each.

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

    def __init__(self, fence: Fence, retention: Retention, at_phase: AtPhase, shard_bytes: int = SHARD_BYTES) -> None:
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
        for number, part in enumerate(shares(contents.tensors, self._shard_bytes)):
            self.at_phase("values")
            name = f"values-{number:05d}.safetensors"
            files.append(write_shard(work / name, part))
            listed.append(Shard(name, described(part)))
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


def clear_up(fence: Fence) -> None:
    """Remove what attempts up to this one have not finished, and put back what nothing has replaced.

    Raises StaleAttempt, OSError.
    """
    with fence.committing():
        for path in list(fence.folder.iterdir()):
            if is_leftover(path.name, fence.claim.number):
                out_of_the_way(path)
        settle_replaced(fence.folder)
    delete_removed(fence.folder)


def settle_replaced(folder: Path) -> None:
    """Decide on what was about to be replaced: it goes if that has happened, else it comes back. The fence is held."""
    for path in list(folder.iterdir()):
        if not path.name.startswith(REPLACED):
            continue
        target = folder / path.name.removeprefix(REPLACED)
        if target.exists():
            out_of_the_way(path)
        else:
            path.rename(target)


def out_of_the_way(path: Path) -> None:
    """Give a folder a name of those that are being removed. The fence is held."""
    with contextlib.suppress(FileNotFoundError):  # unfinished, and removed by its own writer meanwhile
        path.rename(path.with_name(f"{REMOVED}{path.name}.{secrets.token_hex(4)}"))


def delete_removed(folder: Path) -> None:
    """Remove the files of what is out of the way."""
    for path in list(folder.iterdir()):
        if path.name.startswith(REMOVED):
            shutil.rmtree(path, ignore_errors=True)
