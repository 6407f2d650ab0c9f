"""Read a replica's log file piece by piece for the server, from the offset that the server holds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CHUNK_BYTES = 45 << 10  # 60 KiB as base64: one message stays below 64 KiB
KEPT_BYTES = 16 << 20  # of a log that the server takes no more of
WINDOW_BYTES = 1 << 20  # sent and not yet acknowledged


class LogTail:
    """`sent` and `acked` are byte offsets in the file; acked <= sent <= size, since a log only grows.

    An acknowledgement of nothing new is of a piece that the server could not store: nothing more is sent until `retry`.
    Of a log that the server takes no more of, nothing is sent, and the file is emptied when it is large: a flood of
    lines must not fill the disk of the node.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sent = 0
        self.acked = 0
        self._is_refused = self._is_full = False

    def rewind(self, offset: int) -> None:
        """Go on from what the server holds (a new connection)."""
        self.sent = self.acked = min(offset, self._size())
        self._is_refused = False

    def ack(self, offset: int, *, full: bool = False) -> None:
        """Note what the server holds now. An offset that was never sent is ignored. `full`: it takes no more."""
        self._is_full = self._is_full or full
        if self.acked < offset <= self.sent:
            self.acked = offset
        elif offset == self.acked < self.sent:
            self._is_refused = True

    def retry(self) -> None:
        """Send again what the server could not store."""
        if self._is_refused:
            self.rewind(self.acked)

    def next_chunk(self) -> tuple[int, bytes] | None:
        """Return (offset, bytes) of the next piece, or None if there is none or the window is full."""
        if self._is_full:
            self._empty()
            return None
        if self._is_refused or self.sent - self.acked >= WINDOW_BYTES or self.sent >= self._size():
            return None
        with self._path.open("rb") as file:
            file.seek(self.sent)
            chunk = file.read(CHUNK_BYTES)
        offset = self.sent
        self.sent += len(chunk)
        return offset, chunk

    def _empty(self) -> None:
        if self._size() > KEPT_BYTES:
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)  # its writers append: they go on at the new end

    @property
    def drained(self) -> bool:
        """True if the whole file has been sent."""
        return self._is_full or (not self._is_refused and self.sent >= self._size())

    @property
    def settled(self) -> bool:
        """True if the server holds the whole file."""
        return self._is_full or self.acked >= self._size()

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:  # nothing has been written yet
            return 0
