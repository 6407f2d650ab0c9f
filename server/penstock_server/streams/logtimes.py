"""When the bytes of a log came: marks of an offset and a time, in a file beside the log.

A mark says from which byte on the log came at or after its time, by the server's clock, so that lines of processes on
several nodes have one order. Marks are `SPACING_MS` apart, `LATE_SPACING_MS` once a log has `MANY` of them. They are an
aid: a disk that refuses one costs that mark.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import structlog

log = structlog.get_logger(__name__)

MARK = struct.Struct("<QQ")
SPACING_MS = 20
LATE_SPACING_MS = 1000
MANY = 1 << 16
MOST_KEPT = 4096
"""Logs whose last mark is remembered."""


class LogTimes:
    """Marks of logs, written by one thread. Reading costs O(log marks) and what is returned."""

    def __init__(self) -> None:
        self._last: OrderedDict[Path, tuple[int, int]] = OrderedDict()  # time in ms, and marks of the file

    def note(self, path: Path, offset: int, now_ms: int) -> None:
        """Mark that what begins at `offset` came now, unless the last mark is as good."""
        last_ms, count = self._last.get(path) or (-LATE_SPACING_MS, _size(path) // MARK.size)
        if now_ms - last_ms < (SPACING_MS if count < MANY else LATE_SPACING_MS):
            return
        try:
            with path.open("ab") as file:
                file.write(MARK.pack(offset, now_ms))
        except OSError as error:
            log.warning("time of a log not stored", path=str(path), error=str(error))
            return
        self._last[path] = (now_ms, count + 1)
        self._last.move_to_end(path)
        while len(self._last) > MOST_KEPT:
            self._last.popitem(last=False)

    def between(self, path: Path, offset: int, end: int) -> list[tuple[int, int]]:
        """Return (offset, Unix ms) of the marks that the bytes from `offset` to before `end` have, ascending."""
        try:
            with path.open("rb") as file:
                marks = _Marks(file.fileno())
                first = max(0, bisect_right(marks, offset, key=lambda mark: mark[0]) - 1)
                found = []
                for index in range(first, len(marks)):
                    if marks[index][0] >= end:
                        break
                    found.append(marks[index])
        except FileNotFoundError:
            return []
        return found


class _Marks(Sequence[tuple[int, int]]):
    """The whole marks of an open file; one that a crash cut is none."""

    def __init__(self, fd: int) -> None:
        self._fd, self._count = fd, os.fstat(fd).st_size // MARK.size

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._count))]
        offset, time_ms = MARK.unpack(os.pread(self._fd, MARK.size, index * MARK.size))
        return offset, time_ms


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
