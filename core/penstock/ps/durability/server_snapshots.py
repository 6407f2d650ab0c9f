"""Snapshots of a server: a folder of safetensors files and a manifest with their sizes and checksums.

Two phases: everything is written into a folder whose name marks it as unfinished, and brought to the disk; then
one rename makes it a snapshot. A crash at any point leaves those before whole; one of the same name is moved aside
first, and back again (`tidy`) if the crash came before the new one had its place.

A snapshot is a *cut* at one position of the log: it holds all records before. Parts of tables may be newer than the
cut (`at`): what they hold already must not be applied again, see `ps.persistence`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from penstock.errors import PeerError, Unavailable
from penstock.ps.durability.wal import Applied
from penstock.ps.rounds.machine import Roster

LOCK = "lock"


class StateLock:
    """Holds a folder until it is closed or the process dies. Raises Unavailable if another process holds it."""

    def __init__(self, folder: Path | None) -> None:
        self._lock: FileLock | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK, mode=0o600, blocking=False, thread_local=False)
        try:
            self._lock.acquire()
        except OSError as error:
            raise Unavailable(f"another server uses {folder}: {error}") from error

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.release()


Tensors = dict[str, torch.Tensor]
AtStep = Callable[[str], None]

MANIFEST = "manifest.json"
VERSION = 1
_NAME = re.compile(r"snapshot\.(\d{20})")
_UNFINISHED, _REPLACED = "unfinished.", "replaced."


@dataclass(frozen=True, slots=True)
class Cut:
    """What a snapshot holds beside tensors. `sequence`: the first record of the log that it does not hold.

    `is_finished`: all trainers had left; the next join begins another run.
    """

    job: str
    index: int
    mode: str
    sequence: int
    blocks: list[str]
    round: int = 0
    applied: Applied = field(default_factory=dict)
    roster: Roster = field(default_factory=Roster)
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One item of `Storage.state`. `at`: the first record of the log that it does not hold."""

    name: str
    tensors: Tensors
    at: int

    @property
    def is_part(self) -> bool:
        """Whether this is a part of a table."""
        return self.tensors.keys() == {"ids", "rows"}


class SnapshotWriter:
    """Writes one snapshot. `at_step` is called before each step, with its name; what it raises ends the writing.

    Raises OSError.
    """

    def __init__(self, path: Path, *, at_step: AtStep = lambda step: None) -> None:
        self.path, self._at_step = path, at_step
        self._work = path.with_name(_UNFINISHED + path.name)
        at_step("begin")
        shutil.rmtree(self._work, ignore_errors=True)  # of a crash
        _put_back(path.with_name(_REPLACED + path.name))
        self._work.mkdir(parents=True)
        self._files: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []

    def add(self, items: list[Item]) -> None:
        """Write items into a file."""
        tensors: Tensors = {}
        for item in items:
            number = len(self._items)
            self._items.append({"name": item.name, "at": item.at, "file": len(self._files)})
            tensors |= {f"{number}:{name}": _own(t) for name, t in item.tensors.items()}
        self._write(tensors)

    def finish(self, cut: Cut, changed: Mapping[tuple[str, int], Any]) -> None:
        """Write what is not tensors, and make it a snapshot."""
        keys = sorted(changed)
        self._write({str(i): torch.from_numpy(np.ascontiguousarray(changed[key])) for i, key in enumerate(keys)})
        body = {
            "version": VERSION, "cut": _plain(cut), "items": self._items, "files": self._files,
            "changed": [list(k) for k in keys],
        }  # fmt: skip
        text = json.dumps(body)
        self._at_step("manifest")
        path = self._work / MANIFEST
        path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "body": text}))
        _to_disk(path)
        _to_disk(self._work)
        self._at_step("rename")
        old = self.path.with_name(_REPLACED + self.path.name)
        if self.path.exists():
            self.path.rename(old)
            self._at_step("replace")
        self._work.rename(self.path)
        self._at_step("parent")
        _to_disk(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what is not finished."""
        shutil.rmtree(self._work, ignore_errors=True)
        _put_back(self.path.with_name(_REPLACED + self.path.name))

    def _write(self, tensors: Tensors) -> None:
        name = f"{len(self._files):06d}.safetensors"
        self._at_step(name)
        path = self._work / name
        try:
            save_file(tensors, path)
        except SafetensorError as error:  # raised for a full disk, too
            raise OSError(f"{path} cannot be written: {error}") from error
        _to_disk(path)
        self._files.append({"name": name, "size": path.stat().st_size, "crc32": _checksum(path)})


class ServerSnapshot:
    """A snapshot to read. Raises PeerError if any byte of it is not what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        body = _manifest(path)
        self._files, self._items = body["files"], body["items"]
        for file in self._files:
            found = path / file["name"]
            if not found.is_file() or found.stat().st_size != file["size"] or _checksum(found) != file["crc32"]:
                raise PeerError(f"{found} is damaged or missing")
        self.cut = _cut(body["cut"])
        last = load_file(path / self._files[-1]["name"])
        self.changed = {(str(b), int(t)): last[str(i)].numpy() for i, (b, t) in enumerate(body["changed"])}

    def items(self) -> Iterator[Item]:
        """Yield all items in the order in which they were taken, with one file in memory at a time."""
        number = 0
        for index, file in enumerate(self._files):
            tensors = load_file(self.path / file["name"])
            while number < len(self._items) and self._items[number]["file"] == index:
                entry, prefix = self._items[number], f"{number}:"
                own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
                yield Item(entry["name"], own, entry["at"])
                number += 1


def finished_cut(path: Path) -> Cut:
    """Return the cut of a snapshot that has all its files, with their sizes. What is in them is not read.

    Raises PeerError for one that is absent, or was not finished.
    """
    body = _manifest(path)
    for file in body["files"]:
        found = path / file["name"]
        if not found.is_file() or found.stat().st_size != file["size"]:
            raise PeerError(f"{found} is cut off or missing")
    return _cut(body["cut"])


def snapshot_path(folder: Path, sequence: int) -> Path:
    """Return where a server's snapshot at a position of its log lies."""
    return folder / f"snapshot.{sequence:020d}"


def snapshots(folder: Path) -> list[tuple[int, Path]]:
    """Return (position in the log, path) of a server's snapshots, oldest first."""
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))] if folder.is_dir() else []
    return sorted(found)


def tidy(folder: Path) -> None:
    """Clean up after a crash: remove what was not finished or has been replaced. No server may write there."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(_UNFINISHED):
            shutil.rmtree(path)
        elif path.name.startswith(_REPLACED):
            _put_back(path)


def newest(folder: Path) -> ServerSnapshot | None:
    """Return the newest snapshot that is whole. Raises PeerError if there are some, but none is whole."""
    errors = []
    for _, path in reversed(snapshots(folder)):
        try:
            return ServerSnapshot(path)
        except (PeerError, OSError) as error:
            errors.append(str(error))
    if errors:
        raise PeerError(f"no snapshot in {folder} can be read: {'; '.join(errors)}")
    return None


def keep_newest(folder: Path, num: int = 2) -> int:
    """Remove older snapshots; return the position in the log that the oldest kept one begins at."""
    found = snapshots(folder)
    for _, path in found[:-num]:
        shutil.rmtree(path)
    return found[-num:][0][0] if found else 0


def _put_back(old: Path) -> None:
    """Give a snapshot that was moved aside its name again, or remove it if another has that."""
    if not old.exists():
        return
    path = old.with_name(old.name.removeprefix(_REPLACED))
    if path.exists():
        shutil.rmtree(old)
    else:
        old.rename(path)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        outer = json.loads((path / MANIFEST).read_text())
        text = outer["body"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise PeerError(f"{path / MANIFEST} is damaged")
        body: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PeerError(f"{path / MANIFEST} cannot be read: {error}") from error
    if body["version"] != VERSION:
        raise PeerError(f"{path} is a snapshot of version {body['version']}; this is version {VERSION}")
    return body


def _plain(cut: Cut) -> dict[str, Any]:
    roster = cut.roster
    return {
        **{k: v for k, v in asdict(cut).items() if k not in {"applied", "roster"}},
        "applied": [[t, b, e, s] for (t, b), (e, s) in cut.applied.items()],
        "roster": {
            "newest": list(roster.newest.items()), "joined": sorted(roster.joined), "left": sorted(roster.left),
            "members": [[t, e, r] for t, (e, r) in roster.members.items()],
        },
    }  # fmt: skip


def _cut(plain: dict[str, Any]) -> Cut:
    roster = plain["roster"]
    return Cut(
        **{k: v for k, v in plain.items() if k not in {"applied", "roster"}},
        applied={(t, b): (e, s) for t, b, e, s in plain["applied"]},
        roster=Roster(
            dict(roster["newest"]), frozenset(roster["joined"]), frozenset(roster["left"]),
            {t: (e, r) for t, e, r in roster["members"]},
        ),
    )  # fmt: skip


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Safetensors refuses tensors that share memory, or are not contiguous."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
