"""Logs of replicas as files: bytes at their offset, none twice, none lost, bounded by a quota.

The length of the file is the acknowledged offset. Bytes beyond it wait until the missing ones come (the
agent sends again from the acknowledged offset); bytes before it are repetitions. At the quota one line
says so, and what follows is acknowledged and not kept. Calls are short appends to the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock_server.clock import Clock
from penstock_server.streams.logtimes import LogTimes

log = structlog.get_logger(__name__)

TAIL_BYTES = 4096
TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Appended:
    """`next_offset`: what to acknowledge. `grew`: subscribers have something to read. `full`: it takes no more."""

    next_offset: int
    grew: bool
    full: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole characters of a log from `offset` up to `next_offset`."""

    offset: int
    next_offset: int
    text: str


class LogStore:
    """The logs of every job, under `root/<job id>/logs/<replica id>.log`."""

    def __init__(self, root: Path, clock: Clock, *, quota_bytes: int) -> None:
        self._root, self._clock, self._quota, self._times = root, clock, quota_bytes, LogTimes()

    def append(self, job_id: str, replica_id: str, offset: int, content: bytes) -> Appended:
        """Append what is new of `content`, which stands at `offset` of the replica's log."""
        path = self._path(job_id, replica_id)
        size = self.size(job_id, replica_id)
        if size >= self._quota:
            return Appended(max(size, offset + len(content)), grew=False, full=True)
        if offset > size or offset + len(content) <= size:
            return Appended(size, grew=False)
        fresh = content[size - offset :]
        kept = fresh[: self._quota - size]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(kept)
                if size + len(kept) >= self._quota:
                    file.write(f"\n[penstock: log cut here, its quota of {self._quota} bytes is used up]\n".encode())
        except OSError as error:  # a full disk: what is not acknowledged comes again
            written = self.size(job_id, replica_id)
            log.warning("log not stored yet", job=job_id, replica=replica_id, offset=written, error=str(error))
            return Appended(written, grew=written > size)
        self._times.note(self._times_path(job_id, replica_id), size, int(self._clock.steady().timestamp() * 1000))
        return Appended(offset + len(content), grew=True, full=size + len(kept) >= self._quota)

    def size(self, job_id: str, replica_id: str) -> int:
        """Return the bytes kept of a replica's log."""
        try:
            return self._path(job_id, replica_id).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, job_id: str, replica_id: str, offset: int, limit: int, *, final: bool = False) -> Piece:
        """Read at most `limit` bytes from `offset`; a character cut in two is left for the next piece.

        `final`: the log will not grow, so what cannot become whole at its very end is given as it is.
        """
        if offset >= self.size(job_id, replica_id):
            return Piece(offset, offset, "")  # and no seek: one beyond what a file can hold is an error
        try:
            with self._path(job_id, replica_id).open("rb") as file:
                file.seek(offset)
                content = file.read(limit)
        except FileNotFoundError:
            content = b""
        whole = content if final and len(content) < limit else content[: whole_characters(content)]
        return Piece(offset, offset + len(whole), whole.decode(errors="replace"))

    def times(self, job_id: str, replica_id: str, offset: int, end: int) -> list[tuple[int, int]]:
        """Return (offset, Unix ms): from which byte on a log came when, of the bytes from `offset` to before `end`."""
        return self._times.between(self._times_path(job_id, replica_id), offset, end)

    def tail(self, job_id: str, replica_id: str) -> str:
        """Return the last lines of a replica's log."""
        size = self.size(job_id, replica_id)
        start = max(0, size - TAIL_BYTES)
        lines = self.read(job_id, replica_id, start, TAIL_BYTES).text.splitlines()
        if start:
            lines = lines[1:]
        return "\n".join(lines[-TAIL_LINES:])

    def _path(self, job_id: str, replica_id: str) -> Path:
        return self._root / job_id / "logs" / f"{replica_id}.log"

    def _times_path(self, job_id: str, replica_id: str) -> Path:
        return self._path(job_id, replica_id).with_suffix(".times")


def whole_characters(content: bytes) -> int:
    """Return the length of `content` without a UTF-8 character that its end cuts in two."""
    for back in range(1, min(4, len(content)) + 1):
        byte = content[-back]
        if byte & 0xC0 == 0x80:
            continue  # inside a character
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(content) - back if length > back else len(content)
    return len(content)
