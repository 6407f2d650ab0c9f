"""One server a state folder: two would write one log."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.errors import Unavailable


class StateLock:
    """Holds a folder until it is closed or the process dies. Raises Unavailable if another process holds it."""

    def __init__(self, folder: Path | None) -> None:
        self._descriptor = -1
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise Unavailable(f"another server uses {folder}: {error}") from error

    def close(self) -> None:
        """Let go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
