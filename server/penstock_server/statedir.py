"""The folder that holds everything a server keeps: database, secrets, logs, segments, snapshots.

One server at a time: the folder is locked by the operating system, so a lock never outlives its holder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from penstock.errors import Unavailable
from penstock.process.private import make_private, write_private

ADDRESS = "server.json"
FILES = frozenset({"server.lock", ADDRESS, "admin.token", "pepper.key", "penstock.db", "jobs", "snapshots"})
"""Of these one is there in a folder that a server used before."""


class InUse(Unavailable):
    """Another server has the state folder, or the database."""


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Create `folder` (0700) and hold it. Raises InUse, naming the holder, if another server does."""
    path = folder / "server.lock"
    lock = FileLock(path, mode=0o600, blocking=False, thread_local=False)
    try:
        make_private(folder, FILES)
        lock.acquire()
    except Timeout as error:
        raise InUse(
            f"the state folder {folder} is in use by another server (process {path.read_text().strip() or 'unknown'}). "
            "Stop that one, name another folder with --state-dir, or have this one wait for its turn with --standby."
        ) from error
    except OSError as error:
        if isinstance(error, PermissionError) and not error.filename:
            raise Unavailable(str(error)) from error
        raise Unavailable(
            f"cannot use the state folder {folder}: {error.strerror}. Name another with --state-dir."
        ) from error
    try:
        path.write_text(f"{os.getpid()}\n")
        (folder / ADDRESS).unlink(missing_ok=True)  # of a server that is gone: another program may listen there by now
        for file in folder.glob("penstock.db*"):  # a server of before may have made it when others could look in
            file.chmod(0o600)
        yield folder
    finally:
        lock.release()


def was_used(folder: Path) -> bool:
    """Return whether a server has ever led with this folder."""
    return (folder / "pepper.key").exists()


def read_address(folder: Path) -> str | None:
    """Return the URL of the server that leads, None while none does."""
    try:
        return str(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError):
        return None


def write_address(folder: Path, url: str) -> None:
    """Write where the server listens to `server.json`, so that a command on this machine finds it."""
    write_private(folder / ADDRESS, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
