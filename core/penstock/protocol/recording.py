"""Recording in full: every step is sent whole for some seconds, not a sample. An agent asks a process for it by a file.

It lies beside the agent's telemetry socket and holds until when, on the monotonic clock, which all processes of a
machine share. A file and no message: over the socket a process gets numbers alone, which an older one reads as well.
"""

from __future__ import annotations

import struct
from pathlib import Path

MAX_S = 30
"""Longest request: what a process sends is bounded all the same, but nothing is to be forgotten running."""
_DEADLINE = struct.Struct("<d")


def request_path(socket: str | Path) -> Path:
    """Return where the request to the processes of a telemetry socket lies."""
    return Path(socket).with_suffix(".record")


def encode(until: float) -> bytes:
    """Return the content of a request. `until`: monotonic, seconds."""
    return _DEADLINE.pack(until)


def until(content: bytes, now: float) -> float:
    """Return until when a request of this content holds, 0 if it does not at this time.

    One that ends later than any can is of before the machine was booted.
    """
    end = float(_DEADLINE.unpack(content)[0]) if len(content) == _DEADLINE.size else 0.0
    return end if now < end <= now + MAX_S else 0.0
