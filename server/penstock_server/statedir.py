"""The folder that holds everything a server keeps: database, secrets, logs, segments, snapshots.

One server at a time: the folder is locked by the operating system, so a lock never outlives its holder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import Unavailable


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Create `folder` (0700) and hold it. Raises Unavailable, naming the holder, if another server does."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(
            f"cannot use the state folder {folder}: {error.strerror}. Name another with --state-dir."
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise Unavailable(
                f"the state folder {folder} is in use by another server (process {holder}). "
                "Stop that one, or name another folder with --state-dir."
            ) from error
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield folder
    finally:
        os.close(fd)


def write_address(folder: Path, url: str) -> None:
    """Write where the server listens to `server.json`, so that a command on this machine finds it."""
    target = folder / "server.json"
    target.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n")
