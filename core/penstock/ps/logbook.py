"""The log of a server as its threads share it; without a state directory there is none, and nothing is kept."""

from __future__ import annotations

import threading
from pathlib import Path

from penstock.ps.journal import Journal
from penstock.ps.wire import Message


class Logbook:
    """A journal behind a lock. `folder` None: sequence numbers are counted, and nothing is written."""

    def __init__(self, folder: Path | None, *, next_sequence: int = 0) -> None:
        self._lock = threading.Lock()
        self._journal = None if folder is None else Journal(folder, next_sequence=next_sequence)
        self._next = next_sequence

    @property
    def is_kept(self) -> bool:
        """Whether records are written."""
        return self._journal is not None

    @property
    def next_sequence(self) -> int:
        """Number of the record that comes next."""
        with self._lock:
            return self._next

    def append(self, message: Message) -> int:
        """Write a record; return its sequence number. Raises OSError: then it is not there."""
        with self._lock:
            if self._journal is not None:
                self._journal.append(message)
            self._next += 1
            return self._next - 1

    def drop(self, sequence: int) -> None:
        """Take out a record that could not be carried out, before the file after its own begins. Raises OSError."""
        with self._lock:
            if self._journal is not None:
                self._journal.drop(sequence)
            self._next -= 1

    def rotate(self) -> int:
        """Begin another file; return the number of its first record."""
        with self._lock:
            if self._journal is not None:
                self._journal.rotate()
            return self._next

    def forget_before(self, sequence: int) -> None:
        """Remove files all of whose records are older."""
        with self._lock:
            if self._journal is not None:
                self._journal.forget_before(sequence)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
