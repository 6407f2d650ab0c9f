"""Pack a working folder into a snapshot: a tar.gz whose bytes depend on names, modes and contents alone.

`.git`, `.venv`, `node_modules`, `__pycache__`, `penstock_state` and what `.penstockignore` names stay out. A line of
that file is a pattern as in a shell (`*.csv`, `data/*`, `runs/`), matched against the path from the folder and against
the last name.
"""

from __future__ import annotations

import fnmatch
import gzip
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from penstock.errors import SpecError
from penstock.settings import PS_HANDOVER_DIR

LIMIT_BYTES = 64 << 20
IGNORE_FILE = ".penstockignore"
ALWAYS_IGNORED = (".git", ".venv", "node_modules", "__pycache__", PS_HANDOVER_DIR)


def pack(folder: Path, target: Path) -> None:
    """Write the snapshot of `folder` to `target`. Raises SpecError if it is no folder or grows beyond 64 MiB."""
    if not folder.is_dir():
        raise SpecError(f"workdir {str(folder)!r} is not a folder")
    patterns = ignored(folder)
    with (
        target.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in walk(folder, folder, patterns):
            _add(tar, path, path.relative_to(folder).as_posix())
            _check_size(raw, folder)
    if target.stat().st_size > LIMIT_BYTES:
        raise _too_large(folder)


def ignored(folder: Path) -> list[str]:
    """Return the patterns of what stays out."""
    try:
        lines = (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    own = [line.strip().rstrip("/") for line in lines]
    return [*ALWAYS_IGNORED, *(line for line in own if line and not line.startswith("#"))]


def walk(top: Path, folder: Path, patterns: list[str]) -> Iterator[Path]:
    """Yield folders, files and links below `folder` in a fixed order, without what is ignored."""
    for path in sorted(folder.iterdir()):
        relative = path.relative_to(top).as_posix()
        if any(fnmatch.fnmatch(relative, pattern) or fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            continue
        if not (path.is_symlink() or path.is_dir() or path.is_file()):
            continue  # sockets and pipes have no content
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from walk(top, path, patterns)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    member = tar.gettarinfo(path, arcname=name)
    if member.islnk():  # the second name of a file that is in already; the receiver needs no links
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    if not member.isreg():
        tar.addfile(member)
        return
    with path.open("rb") as file:
        tar.addfile(member, file)


def _check_size(raw: IO[bytes], folder: Path) -> None:
    if raw.tell() > LIMIT_BYTES:
        raise _too_large(folder)


def _too_large(folder: Path) -> SpecError:
    files = [path for path in walk(folder, folder, ignored(folder)) if path.is_file() and not path.is_symlink()]
    largest = sorted(files, key=lambda path: path.stat().st_size, reverse=True)[:3]
    names = ", ".join(f"{path.relative_to(folder)} ({path.stat().st_size >> 20} MiB)" for path in largest)
    return SpecError(
        f"workdir {str(folder)!r} packs to more than {LIMIT_BYTES >> 20} MiB; the largest files are {names}. "
        f"Name what the job does not need in {IGNORE_FILE}"
    )
