"""Unpacking archives that others made: nothing is written outside a folder, and no device, owner or odd mode is made.

Python does most of that since 3.11.4 (`tarfile.data_filter`); distributions that people have bring older ones, Debian
12 has 3.11.2. So the same is refused here, on every Python, and what its filter lets through besides: a link whose name
ends with a slash, and a hard link to a member that is no file on the disk, which tarfile replaces by a copy of that
member, unfiltered.
"""

from __future__ import annotations

import copy
import os
import tarfile
from pathlib import Path


def extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write one member below `target`. Raises tarfile.TarError if it leaves that, or is no file, folder or link."""
    safe = harmless(member, target)
    if hasattr(tarfile, "data_filter"):
        tar.extract(safe, target, filter="data")
    else:
        tar.extract(safe, target)


def harmless(member: tarfile.TarInfo, target: Path) -> tarfile.TarInfo:
    """Return a member as it may be written below `target`: this process owns it. Raises tarfile.TarError."""
    root, name = os.path.realpath(target), member.name.strip("/")
    if not _is_below(root, name):
        raise tarfile.TarError(f"{member.name!r} would be outside of the folder")
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise tarfile.TarError(f"{member.name!r} is no file, folder or link")
    if member.issym() or member.islnk():
        start = os.path.dirname(name) if member.issym() else ""
        if os.path.isabs(member.linkname) or not _is_below(root, os.path.join(start, member.linkname)):
            raise tarfile.TarError(f"{member.name!r} is a link to {member.linkname!r}, outside of the folder")
    if member.islnk() and not _is_file(os.path.join(root, member.linkname)):
        raise tarfile.TarError(f"{member.name!r} is a hard link to {member.linkname!r}, which is no file before it")
    out = copy.copy(member)
    out.name, out.uid, out.gid, out.uname, out.gname = name, os.getuid(), os.getgid(), "", ""
    runs = 0o111 if member.mode & 0o100 else 0
    out.mode = 0o755 if member.isdir() else (member.mode & 0o644) | 0o600 | (member.mode & 0o111 & runs)
    return out


def _is_below(root: str, name: str) -> bool:
    """Whether a path is below a folder once the links that are there already are followed."""
    return os.path.commonpath([root, os.path.realpath(os.path.join(root, name))]) == root


def _is_file(path: str) -> bool:
    """Whether there is a file, and no link to one."""
    return os.path.isfile(path) and not os.path.islink(path)
