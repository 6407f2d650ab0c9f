"""Files that appear under their name when they are whole, gzipped where the name says so."""

from __future__ import annotations

import gzip
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from penstock.errors import SpecError

GZIP_LEVEL = 1
"""A slice of a trace takes 116 bytes, 18 with level 1, and with level 6 14 for four times the processor's time."""
_NAME_CHARACTERS = 50  # of a name in that of its part, which may have 255 bytes


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing beside `path`, which it replaces at the end; after an error nothing is left.

    A symbolic link is followed. What is no regular file, such as /dev/stdout or a pipe, is written to as data comes.
    Raises SpecError if the file cannot be written.
    """
    try:
        with _open(path) as plain:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", GZIP_LEVEL, plain, mtime=0) as packed:
                    yield cast(BinaryIO, packed)
            else:
                yield plain
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror or error}; give another file with --output") from error


def part_of(path: Path) -> Path:
    """Return a new hidden name beside `path`, for what will have its name."""
    return path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{secrets.token_hex(4)}.part")


@contextmanager
def whole_folder(folder: Path, why_not: str) -> Iterator[Path]:
    """Give a folder beside `folder`, which gets its name at the end, or in it, if it exists: it may be a mount.

    Raises SpecError if it is not empty. `why_not`: what would happen then.
    """
    exists = folder.exists()
    if exists and any(folder.iterdir()):
        raise SpecError(f"{folder} is not empty, and {why_not}: give another --output")
    part = part_of(folder / folder.name if exists else folder)
    try:
        part.mkdir(parents=True)
        yield part
        if exists:
            for one in part.iterdir():
                one.rename(folder / one.name)
        else:
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _beside(path: Path) -> Iterator[BinaryIO]:
    part = part_of(path)
    try:
        with part.open("xb") as plain:
            yield plain
        part.replace(path)
    finally:
        with suppress(OSError):  # else it would take the place of the error that says why there is no file
            part.unlink(missing_ok=True)


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    if is_stdout(path):
        return os.fdopen(os.dup(1), "wb")  # a new descriptor would truncate the file that a shell has made of it
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        regular = True
    return _beside(Path(os.path.realpath(path))) if regular else path.open("wb")


def is_stdout(path: Path) -> bool:
    """Whether a path is standard output, under any of its names."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False  # does not exist, or is closed
