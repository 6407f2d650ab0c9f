"""The lease file: how long replicas of this node that heed it may run without news from the server.

Standard library only. The agent writes it after every answer of the server; guards of jobs that ask for it read it.
Times are seconds of CLOCK_BOOTTIME, which counts through suspend and never jumps, so that both sides agree and no wall
clock is compared.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.process.private import write_private


@dataclass(frozen=True, slots=True)
class Lease:
    """`expires_at`: boot time at which the lease ends; `grace_s`: how long replicas run on after that."""

    expires_at: float
    grace_s: float

    @property
    def end(self) -> float:
        """Boot time at which replicas end themselves."""
        return self.expires_at + self.grace_s


def now() -> float:
    """Return the seconds since boot, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read(path: Path) -> Lease | None:
    """Return the lease, or None if there is no readable one (a guard then goes on with the last one it read)."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Lease(expires_at=float(fields["expires_at"]), grace_s=float(fields["grace_s"]))
    except (FileNotFoundError, ValueError, KeyError):
        return None


def write(path: Path, lease: Lease) -> None:
    """Replace the lease file in one step."""
    write_json(path, {"expires_at": lease.expires_at, "grace_s": lease.grace_s})


RESERVED_BYTES = 1 << 14


def reserve(path: Path) -> None:
    """Take the disk space that `write_reserved` needs at `path`, so that a disk that fills up meanwhile is no matter.

    Raises OSError if there is none.
    """
    descriptor = os.open(_reserve_of(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, RESERVED_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_reserved(path: Path, fields: dict[str, Any]) -> None:
    """Write as `write_json`, into the space that was reserved for this path, if there is any left.

    The file ends in spaces. Raises OSError if it needs more space, and there is none.
    """
    content = json.dumps(fields).encode()
    reserved = _reserve_of(path)
    if len(content) > RESERVED_BYTES or not reserved.exists():
        write_json(path, fields)
        return
    descriptor = os.open(reserved, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content.ljust(RESERVED_BYTES), 0)
    finally:
        os.close(descriptor)
    os.replace(reserved, path)


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Replace `path` in one step by a JSON object that only its owner may read."""
    write_private(path, json.dumps(fields))
