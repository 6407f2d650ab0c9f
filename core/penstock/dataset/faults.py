"""What is wrong with data, with file, line, column and reason; and what happens to it.

Policy `raise`: the first bad line ends the run. `skip`: bad lines are left out, counted and, at the end, reported;
the first ten are retained. A command or a compressed file that fails raises under both: what it would have
given is unknown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Literal

from penstock.dataset.slots import Slot
from penstock.errors import UserError
from penstock.native import _feed

_log = logging.getLogger(__name__)
Policy = Literal["raise", "skip"]
POLICIES: tuple[Policy, ...] = ("raise", "skip")
KEPT = 10


class DataError(UserError):
    """Data cannot be read. Fields: file, line, column (from 1; 0: no line's fault), reason."""

    code = "data_error"


def line_error(path: str, fault: _feed.Fault, slots: Sequence[Slot], lines_before: int = 0) -> DataError:
    """Return the error of a line. `lines_before`: lines of the file before those that `fault` counts."""
    number, column, reason, text = fault
    hints = [f" ({slot.hint})" for slot in slots if slot.hint and reason.startswith(f"slot '{slot.name}' announces ")]
    reason = "".join([reason, *hints])
    line = lines_before + number
    shown = text.decode("utf-8", "backslashreplace")
    return DataError(
        f"{path}:{line}:{column}: {reason}. The line begins: {shown!r}. Correct the data or its generator, or leave "
        "bad lines out and have them counted: dataset.set_bad_line_policy('skip')",
        file=path, line=line, column=column, reason=reason,
    )  # fmt: skip


def file_error(path: str, reason: str) -> DataError:
    """Return the error of a file as a whole."""
    return DataError(f"{path}: {reason}", file=path, line=0, column=0, reason=reason)


class Skipped:
    """Bad lines that were left out. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.first: list[DataError] = []
        self._num_logged = 0

    def add(self, count: int, first: list[DataError]) -> None:
        """Count lines; keep some."""
        with self._lock:
            self.count += count
            self.first += first[: KEPT - len(self.first)]

    def log(self) -> None:
        """Log what was skipped since the last time."""
        with self._lock:
            new, self._num_logged = self.count - self._num_logged, self.count
        if new:
            _log.warning("%d bad lines were left out (policy 'skip'); the first: %s", new, self.first[0])
