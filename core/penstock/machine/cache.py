"""The folder for what is measured or fetched once for a machine: `$PENSTOCK_CACHE`, else the user's cache folder."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from penstock.machine.capability import Absent, probe
from penstock.settings import CACHE, USER_CACHE


def cache_folder() -> Path:
    """Name the folder, which need not exist. Raises RuntimeError where no variable names it and there is no home."""
    return CACHE.read() or user_cache() / "penstock"


def user_cache() -> Path:
    """Name the folder for caches of the user. Raises RuntimeError where there is no home."""
    return USER_CACHE.read() or Path.home() / ".cache"


@probe("cache_folder", fallback="measurements live as long as the process; data sets go to the temporary folder")
def _cache_folder() -> str:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    check_writes(folder)
    return str(folder)


@probe("file_locks", fallback="measurements live as long as the process")
def _file_locks() -> str:
    folder = cache_folder()
    with tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None) as file:
        check_locks(file.fileno())
    return "flock excludes a second holder"


def check_writes(folder: Path) -> None:
    """Raise OSError or Absent unless a file of `folder` can be written, read back and removed."""
    expected = os.urandom(16)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
        file.write(expected)
        file.flush()
        found = Path(file.name).read_bytes()
    if found != expected:
        raise Absent(f"a file of {folder} reads back {len(found)} bytes that were not written")


def check_locks(descriptor: int) -> None:
    """Raise OSError or Absent unless a lock on an open file keeps a second opening of it out."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(second)
    raise Absent("flock lets two hold one lock")
