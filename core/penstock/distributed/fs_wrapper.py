"""`paddle.distributed.fs_wrapper`: folders of this machine, as checkpoints of a fleet take them.

Source: python/paddle/distributed/fs_wrapper.py (Fluid 1.8).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["LocalFS"]

Place = str | os.PathLike[str]


class LocalFS:
    """Files and folders of this machine. Raises OSError as the file system does."""

    def list_dirs(self, fs_path: Place) -> list[str]:
        """Return the names of the folders in a folder; none of one that is not there."""
        return [entry.name for entry in Path(fs_path).iterdir() if entry.is_dir()] if self.stat(fs_path) else []

    def ls_dir(self, fs_path: Place) -> list[str]:
        """Return the names in a folder."""
        return os.listdir(fs_path)

    def stat(self, fs_path: Place) -> bool:
        """Whether there is something."""
        return Path(fs_path).exists()

    def mkdir(self, fs_path: Place) -> None:
        """Make a folder with those above it, unless it is there."""
        Path(fs_path).mkdir(parents=True, exist_ok=True)

    def mv(self, fs_src_path: Place, fs_dst_path: Place) -> None:
        """Rename."""
        Path(fs_src_path).rename(fs_dst_path)

    def rmr(self, fs_path: Place) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(fs_path)

    def rm(self, fs_path: Place) -> None:
        """Remove a file."""
        Path(fs_path).unlink()

    def delete(self, fs_path: Place) -> None:
        """Remove a file or a folder, if it is there."""
        if Path(fs_path).is_dir():
            self.rmr(fs_path)
        else:
            Path(fs_path).unlink(missing_ok=True)

    def need_upload_download(self) -> bool:
        """False: files are used where they lie."""
        return False
