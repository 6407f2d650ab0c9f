"""The log files of a launcher's processes, each written by one launcher at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from penstock.errors import SpecError


@contextmanager
def claimed(logs: Sequence[Path]) -> Iterator[None]:
    """Keep log files, and make their folders: two launchers at one file would destroy each other's lines.

    Raises SpecError for a file that cannot be written, or that another launcher has.
    """
    with ExitStack() as stack:
        for log in logs:
            _lock(stack.enter_context(_open(log)), log)
        yield


def _open(log: Path) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        raise SpecError(
            f"the log file {log} cannot be written: {error.strerror}. Choose another folder with --log_dir",
            pointer="--log_dir",
        ) from error


def _lock(file: IO[bytes], log: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not filelock: the orphan reaper inherits the lock
    except BlockingIOError as error:
        raise SpecError(
            f"another launcher writes to {log}, or what it has started has not ended yet. Choose another folder with "
            "--log_dir, or wait",
            pointer="--log_dir",
        ) from error
    except OSError as error:
        raise SpecError(
            f"the log file {log} cannot be kept to this launcher: {error.strerror}. Choose a folder with --log_dir "
            "whose file system has locks",
            pointer="--log_dir",
        ) from error
