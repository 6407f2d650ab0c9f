"""Frames of one replica on disk until the server has stored them: an agent that is killed loses none.

A record is `{u32 length, u32 crc32, frame}`, as in a segment of the server; what follows a torn one is not read. It is
in the page cache, which outlives the agent, when `append` returns; a machine that crashes may lose the newest. Bounded:
what does not fit, or what a full disk does not take, is not there, and its sender keeps it.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

RECORD = struct.Struct("<II")
LIMIT_BYTES = 64 << 20
_log = logging.getLogger(__name__)


class Spool:
    """One file. Owned by the agent's event loop: calls are short writes to the page cache."""

    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit_bytes
        self._fd: int | None = None
        self._failed = False
        self.size_bytes = 0

    def load(self) -> list[bytes]:
        """Return what a former agent left, oldest first."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        frames, at = [], 0
        while at + RECORD.size <= len(content):
            size, checksum = RECORD.unpack_from(content, at)
            frame = content[at + RECORD.size : at + RECORD.size + size]
            if len(frame) != size or zlib.crc32(frame) != checksum:
                break
            frames.append(frame)
            at += RECORD.size + size
        self.size_bytes = at
        if at != len(content):
            os.truncate(self._path, at)
        return frames

    def append(self, frame: bytes) -> bool:
        """Add a frame; return whether it is there."""
        record = RECORD.pack(len(frame), zlib.crc32(frame)) + frame
        if self.size_bytes + len(record) > self._limit:
            return False
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            written = os.write(self._fd, record)
            if written != len(record):
                os.ftruncate(self._fd, self.size_bytes)
                return False
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written, so frames are held in memory alone: %s", self._path, error)
            self._failed = True
            return False
        self._failed = False
        self.size_bytes += written
        return True

    def trim(self, held: Sequence[bytes]) -> None:
        """Keep `held` alone, if that frees half of the file or all of it."""
        size = sum(RECORD.size + len(frame) for frame in held)
        if not self.size_bytes or 2 * size > self.size_bytes:
            return
        part = self._path.with_suffix(".part")
        try:
            if held:
                part.write_bytes(b"".join(RECORD.pack(len(frame), zlib.crc32(frame)) + frame for frame in held))
                part.chmod(0o600)
                self.close()
                part.replace(self._path)
            else:
                os.truncate(self._path, 0)
        except OSError as error:  # repeated frames are harmless, and the next time is soon
            _log.warning("%s could not be made shorter: %s", self._path, error)
            return
        self.size_bytes = size

    def close(self) -> None:
        """Close the file; it stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
