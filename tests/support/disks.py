"""Small file systems that tests fill. To mount one needs root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system in memory at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fill the file system of a folder, down to the last byte, while the block runs."""
    with (folder / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
        while True:
            fill.write(bytes(1 << 16))
    try:
        yield
    finally:
        (folder / "fill").unlink()
