"""Write-ahead log of a parameter server, and the index of what was applied: a kill loses nothing acknowledged.

One file after another, `journal.<first>.log`; a record is a 28-byte prefix (magic, body length, head length, CRC-32 of
head and body, sequence number) and one message of `wire`. Native code writes it (`native/src/ps/log_file.h`), for
Python and for what it carries out by itself. A record is handed to the operating system before its update is
acknowledged: it survives the death of the process. A record that is not whole ends the log: it was never acknowledged,
and is cut off.

The index changes together with the log, under the lock of the block (or of all blocks, for a round), so a snapshot that
holds all locks sees it as of one position of the log. Replay of the log calls the same methods.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import Bug, PeerError
from penstock.native.channels import LogFile, crc32
from penstock.ps.rounds.machine import Roster
from penstock.ps.rounds.messages import TrainerIncarnation
from penstock.ps.wire import MAX_HEAD_BYTES, Message, Value, decode, encode

_PREFIX = struct.Struct("<4sQIIQ")
_MAGIC, _FAMILY = b"PSJ2", b"PSJ"
_NAME = re.compile(r"journal\.(\d{20})\.log")


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One update. `sequence`: counts from 0 over the server's whole life."""

    sequence: int
    message: Message


class WriteAheadLog:
    """Appends records. Thread-safe; one writer a folder. `folder` None: records are counted, nothing is written.

    `file`: the open file, to which native code may append too, see `penstock.ps.prepared`.
    """

    def __init__(self, folder: Path | None, *, next_sequence: int = 0) -> None:
        self._lock = threading.Lock()
        self._folder, self.file = folder, LogFile(next_sequence)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._begin(folder)

    @property
    def is_kept(self) -> bool:
        """Whether records are written."""
        return self.file.is_kept

    @property
    def next_sequence(self) -> int:
        """Number of the record that comes next."""
        return self.file.next

    def num_bytes(self, since: int) -> int:
        """Return the size of the files that begin with a record or a later one: those that a start would read."""
        with self._lock:
            files = [] if self._folder is None else log_files(self._folder)
            return sum(path.stat().st_size for first, path in files if first >= since)

    def append(self, message: Message) -> int:
        """Write one record; return its sequence number. On an OSError (disk full) the log is as it was before."""
        with self._lock:
            return self._write(message)

    def _write(self, message: Message) -> int:
        head, parts = encode(message) if self.is_kept else (b"", [])
        return self.file.append(head, parts)

    def drop(self, sequence: int) -> None:
        """Take a record of the open file out again; those after it move up. Raises OSError."""
        with self._lock:
            if not self.is_kept:
                self.file.cut(0, self.file.next - 1)
                return
            begin, later = self._from(sequence)
            self.file.cut(begin, sequence)
            for message in later:
                self._write(message)

    def _from(self, sequence: int) -> tuple[int, list[Message]]:
        """Return where a record of the open file begins, and the records after it."""
        data = _mapped(self._path)
        offset, later = 0, []
        begin = len(data)
        while (found := _record(data, offset)) is not None:
            record, end = found
            if record.sequence == sequence:
                begin = offset
            elif record.sequence > sequence:
                later.append(_copied(record.message))
            offset = end
        if begin == len(data):
            raise Bug(f"{self._path} has no record {sequence} to drop")
        return begin, later

    def rotate(self) -> int:
        """Begin another file, from which on a snapshot taken now holds nothing; return its first record's number."""
        with self._lock:
            if self._folder is not None and self.is_kept:
                self._begin(self._folder)
            return self.file.next

    def forget_before(self, sequence: int) -> None:
        """Remove the files all of whose records a finished snapshot holds."""
        with self._lock:
            files = [] if self._folder is None else log_files(self._folder)
            for (_, path), (following, _) in pairwise(files):
                if following <= sequence:
                    path.unlink()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            self.file.close()

    def _begin(self, folder: Path) -> None:
        path = folder / f"journal.{self.file.next:020d}.log"
        self.file.open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        self._path = path


def log_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (first sequence number, path) of each log file, in order."""
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))] if folder.is_dir() else []
    return sorted(found)


def recover(folder: Path, *, since: int) -> Iterator[LogRecord]:
    """Yield the whole records from sequence number `since` on, and cut off a torn end. Before a log is opened.

    Raises PeerError if a record in the middle is damaged or missing: what comes after it must not be applied.
    """
    expected = since
    files = log_files(folder)
    for position, (_, path) in enumerate(files):
        is_last = position == len(files) - 1
        data = _mapped(path)
        if data[:3] == _FAMILY and len(data) > 3 and data[:4] != _MAGIC:
            raise PeerError(f"{path} is a log of version {bytes(data[:4])!r}; this is version {_MAGIC!r}")
        offset = 0
        while offset < len(data):
            found = _record(data, offset)
            if found is None:
                if not is_last:
                    raise PeerError(f"{path} is damaged at byte {offset}, and later files of the log go on from there")
                os.truncate(path, offset)
                return
            record, offset = found
            if record.sequence < since:
                continue
            if record.sequence != expected:
                raise PeerError(f"{path}: record {expected} is missing; the log goes on with {record.sequence}")
            expected += 1
            yield record


def _mapped(path: Path) -> memoryview:
    """Return a file's bytes, which are read where they are looked at. The mapping ends with the last view of it."""
    with path.open("rb") as file:
        empty = os.fstat(file.fileno()).st_size == 0  # what cannot be mapped
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _copied(message: Message) -> Message:
    return replace(message, tensors=[replace(t, data=memoryview(bytes(t.data))) for t in message.tensors])


def _record(data: memoryview, offset: int) -> tuple[LogRecord, int] | None:
    """Return the record at `offset` and where the next one begins, or None if it is not whole."""
    if len(data) - offset < _PREFIX.size:
        return None
    magic, body_length, head_length, checksum, sequence = _PREFIX.unpack_from(data, offset)
    begin = offset + _PREFIX.size
    end = begin + head_length + body_length
    if magic != _MAGIC or head_length > MAX_HEAD_BYTES + 8 or end > len(data):
        return None
    if crc32(data[begin:end]) != checksum:
        return None
    middle = begin + head_length
    return LogRecord(sequence, decode(bytes(data[begin:middle]), data[middle:end])), end


Ids = npt.NDArray[np.int64]
_COMPACT_AT = 64  # pieces


def _union(pieces: list[Ids]) -> Ids:
    """Return the different ids of all pieces, ascending, in memory of its own."""
    joined = np.concatenate(pieces)
    joined.sort()  # with vector instructions, faster than numpy.unique, which goes through a hash table
    return joined[np.flatnonzero(np.diff(joined, prepend=joined[:1] - 1))]


class ChangedRows:
    """GEO: rows of a block that others have changed since a trainer last asked, by (block, trainer).

    An answer may be lost: its rows are retained, and sent again, until the trainer pushes its next step, since it
    pushes only after it has received the answer. Not thread-safe for one block: its lock is held around calls.
    """

    def __init__(self, trainers: set[int]) -> None:
        self.trainers = set(trainers)
        self._fresh: defaultdict[tuple[str, int], list[Ids]] = defaultdict(list)
        self._sent: dict[tuple[str, int], Ids] = {}

    def note(self, block: str, trainer: int, rows: Ids) -> None:
        """A trainer has pushed these rows: send them to all others."""
        self._sent.pop((block, trainer), None)
        others = self.trainers - {trainer}
        own = _union([rows]) if others else rows
        for other in others:
            pieces = self._fresh[block, other]
            pieces.append(own)
            if len(pieces) >= _COMPACT_AT:
                pieces[:] = [_union(pieces)]

    def take(self, block: str, trainer: int) -> Ids:
        """Return the rows to send to a trainer, ascending."""
        key = (block, trainer)
        sent = self._sent.get(key, np.empty(0, np.int64))
        self._sent[key] = _union([sent, *self._fresh.pop(key, [])])
        return self._sent[key]

    def read_whole(self, block: str, trainer: int) -> None:
        """A trainer reads the whole block: nothing is left to send."""
        self._fresh.pop((block, trainer), None)

    def state(self) -> dict[tuple[str, int], Ids]:
        """Return all that is still to be sent."""
        keys = {*self._fresh, *self._sent}
        pieces = {key: [self._sent.get(key, np.empty(0, np.int64)), *self._fresh.get(key, [])] for key in keys}
        return {key: _union(some) for key, some in pieces.items()}

    def restore(self, state: dict[tuple[str, int], Ids]) -> None:
        """Go on from `state`."""
        for key, ids in state.items():
            self.trainers.add(key[1])
            self._fresh[key].append(ids)


Applied = dict[tuple[int, str], tuple[int, int]]


class AppliedIndex:
    """What a restart needs beside the parameters.

    `round`: rounds applied. `applied`: (trainer, block) -> (epoch, step) of its newest applied push.
    """

    def __init__(self, *, trainers: int, keeps_changes: bool) -> None:
        self.round = 0
        self.applied: Applied = {}
        self.changed = ChangedRows(set(range(trainers)))
        self._keeps_changes = keeps_changes

    def close_round(self, number: int) -> None:
        """A round is logged and applied."""
        self.round = number + 1

    def apply(self, sender: TrainerIncarnation, step: int, block: str, rows: Any | None) -> None:
        """A push is logged and applied."""
        self.applied[sender.trainer, block] = (sender.epoch, step)
        if self._keeps_changes and rows is not None:
            self.changed.note(block, sender.trainer, rows.numpy())

    def leave(self, trainer: int) -> None:
        """A trainer has left: under the same epoch it may count its steps from the beginning."""
        # Other threads add what they apply meanwhile: only a copy can be walked through.
        for key in [key for key in list(self.applied) if key[0] == trainer]:
            del self.applied[key]


def with_record(roster: Roster, kind: str, fields: Mapping[str, Value]) -> Roster:
    """Return the roster after a record of membership."""
    trainer, members, newest = int(fields["trainer"]), dict(roster.members), dict(roster.newest)
    if kind == "joined":
        epoch = int(fields["epoch"])
        members[trainer] = (epoch, int(fields["round"]))
        newest[trainer] = epoch
        return Roster(newest, roster.joined | {trainer}, roster.left - {trainer}, members)
    members.pop(trainer, None)
    if kind == "left":
        return Roster(newest, roster.joined, roster.left | {trainer}, members)
    if kind == "lost":
        return Roster(newest, roster.joined, roster.left, members)
    raise PeerError(f"a log has no records called {kind!r}")
