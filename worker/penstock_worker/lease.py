"""The lease file: how long the replicas of this node may run without news from the server. Standard library only.

The agent writes it after every answer of the server; every guard reads it. Times are seconds of CLOCK_BOOTTIME,
which counts through suspend and never jumps, so that both sides agree and no wall clock is compared.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Replace `path` in one step by a JSON object that only its owner may read."""
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(fields, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
