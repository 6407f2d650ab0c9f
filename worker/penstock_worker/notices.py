"""The files of a replica's preemption, as agent and guard use them (`penstock.protocol.preemption`). Stdlib only.

FOLDER/preemption.json is the agent's own, and says until when and why. The guard goes by it, and so does an agent that
restarts: without it the replica was never asked, whatever its processes say. The notice that they see beside their
socket belongs to the account that they run as; only answers are read from it. Nothing here raises for what they did.
"""

from __future__ import annotations

from pathlib import Path

from penstock.process.private import read_regular, write_private
from penstock.protocol import preemption

FILE = "preemption.json"


def write(folder: Path, content: bytes) -> None:
    """Write the agent's own notice, by which the guard ends the replica. Raises OSError."""
    write_private(folder / FILE, content)


def read(path: Path) -> preemption.Notice | None:
    """Return the agent's own notice at `path`, None without one."""
    return preemption.decode(_content(path))


def answer(path: Path) -> int | None:
    """Return the step that the processes have answered in their notice at `path`, None if they have not."""
    return preemption.decode_answer(_content(path))


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, preemption.MAX_BYTES)
    except OSError:
        return b""
