"""Folders and files that no other user may look into. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Set
from pathlib import Path

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private(folder: Path, ours: Set[str]) -> None:
    """Create `folder` with mode 0700, or take the rights of others away from one that is there.

    Only from an empty one, or one that holds something of `ours`: a folder that is used for other things, such as /tmp,
    stays as it is. Raises PermissionError then, and OSError if that cannot be done.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & OTHERS:
        return
    names = {path.name for path in folder.iterdir()}
    if names and names.isdisjoint(ours):
        raise PermissionError(
            f"{folder} can be read by other users (mode {mode:04o}) and is used for other things; it would hold "
            f"secrets. Name an own folder with --state-dir, or run 'chmod 700 {folder}'."
        )
    folder.chmod(mode & ~OTHERS)


def write_private(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Replace `path` by a file of mode 0600 in one step: who reads it finds all of the old or all of the new.

    `durable`: it is on disk when this returns. Raises OSError, and leaves the file as it was.
    """
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_private(path: Path) -> bytes:
    """Return what `write_private` has written; nothing where there is no file, or it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the first bytes of a file that others write; nothing where there is none.

    Raises OSError if it is a link or no file: neither is followed, nor waited for.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, f"{path} is no file")
    with os.fdopen(number, "rb") as file:
        return file.read(limit_bytes)
