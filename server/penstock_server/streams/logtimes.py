"""When the bytes of a log came: marks of an offset and a time, in a file beside the log.

A mark says from which byte on the log came at or after its time, by the server's clock, so that lines of processes on
several nodes have one order. Times of one log never go back, whatever the clock was set to.
Marks are `SPACING_MS` apart, `LATE_SPACING_MS` once a log has `MANY` of them. They are an aid: a disk that refuses one
costs that mark.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
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
        self._last: OrderedDict[Path, _Last] = OrderedDict()

    def note(self, path: Path, offset: int, now_ms: int) -> None:
        """Mark that what begins at `offset` came now, unless the last mark is as good.

        `now_ms`: Unix time that never goes back while this process runs.
        """
        last = self._last.get(path)
        if last is not None and now_ms - last.noted_ms < (SPACING_MS if last.count < MANY else LATE_SPACING_MS):
            return
        try:
            last = last or _last_of(path)
            time_ms = max(now_ms, last.time_ms)
            with path.open("ab") as file:
                file.write(MARK.pack(offset, time_ms))
        except OSError as error:
            self._last.pop(path, None)  # the file may have a part of the mark now
            log.warning("time of a log not stored", path=str(path), error=str(error))
            return
        self._last[path] = _Last(now_ms, time_ms, last.count + 1)
        self._last.move_to_end(path)
        while len(self._last) > MOST_KEPT:
            self._last.popitem(last=False)

    def between(self, path: Path, offset: int, end: int) -> list[tuple[int, int]]:
        """Return (offset, Unix ms) of the marks that the bytes from `offset` to before `end` have, ascending."""
        try:
            with path.open("rb") as file:
                marks = _Marks(file.fileno())
                first = max(0, bisect_right(marks, offset, key=_offset) - 1)
                return marks.piece(first, bisect_left(marks, end, lo=first, key=_offset))
        except FileNotFoundError:
            return []


@dataclass(frozen=True, slots=True)
class _Last:
    """The last mark of a file: when it was made, the time that it has, and how many there are."""

    noted_ms: int
    time_ms: int
    count: int


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
        [mark] = self.piece(index, index + 1)
        return mark

    def piece(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the marks from `first` to before `end`: one read, however many there are."""
        content = os.pread(self._fd, (end - first) * MARK.size, first * MARK.size)
        return [(offset, time_ms) for offset, time_ms in MARK.iter_unpack(content)]


def _offset(mark: tuple[int, int]) -> int:
    return mark[0]


def _last_of(path: Path) -> _Last:
    """Return the last mark that another process left; a part of one after it is cut off. Raises OSError."""
    try:
        with path.open("r+b") as file:
            count = len(marks := _Marks(file.fileno()))
            file.truncate(count * MARK.size)
            return _Last(0, marks[count - 1][1] if count else 0, count)
    except FileNotFoundError:
        return _Last(0, 0, 0)
