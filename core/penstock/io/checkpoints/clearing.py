"""Removing checkpoints, and clearing up what dead writers left, so that nobody meets half of one.

What is to go is renamed first, while no other attempt can claim the folder; then nobody takes its files for those of a
checkpoint, and whoever still writes into it (a process that was taken over, but lives) finds its folder gone. Its files
may be removed by several processes at once: what one of them does not get, the next start removes.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from pathlib import Path

from penstock.io.checkpoints.fence import Fence
from penstock.io.checkpoints.layout import REMOVED, REPLACED, is_leftover


def clear_up(fence: Fence) -> None:
    """Remove what attempts up to this one have not finished, and put back what nothing has replaced.

    Raises StaleAttempt, OSError.
    """
    with fence.committing():
        for path in list(fence.folder.iterdir()):
            if is_leftover(path.name, fence.claim.number):
                out_of_the_way(path)
        settle_replaced(fence.folder)
    delete_removed(fence.folder)


def settle_replaced(folder: Path) -> None:
    """Decide on what was about to be replaced: it goes if that has happened, else it comes back. The fence is held."""
    for path in list(folder.iterdir()):
        if not path.name.startswith(REPLACED):
            continue
        target = folder / path.name.removeprefix(REPLACED)
        if target.exists():
            out_of_the_way(path)
        else:
            path.rename(target)


def out_of_the_way(path: Path) -> None:
    """Give a folder a name of those that are being removed. The fence is held."""
    with contextlib.suppress(FileNotFoundError):  # unfinished, and removed by its own writer meanwhile
        path.rename(path.with_name(f"{REMOVED}{path.name}.{secrets.token_hex(4)}"))


def delete_removed(folder: Path) -> None:
    """Remove the files of what is out of the way."""
    for path in list(folder.iterdir()):
        if path.name.startswith(REMOVED):
            shutil.rmtree(path, ignore_errors=True)
