"""What the communicators share: the servers behind them, and errors of threads that nobody waits for.

Invariant: the first error of a background thread ends the exchange, and every later call raises it, with what was
being done, of which variable, with which endpoints. Nothing is swallowed, nothing waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock.errors import Bug, PenstockError, Unavailable
from penstock.native.remote import Descriptor, Remote
from penstock.ps.counters import Counters


class Servers(Remote, Protocol):
    """Parameter servers that answer each call before it returns: what a communicator stands on."""

    def changed(self, block: str, at: int) -> tuple[Tensor, Tensor]:
        """GEO: return the rows of a block that others changed since the last call, int64[n], and their values now."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where the blocks of a variable are. `heights`: None for a dense one; see native.remote.Remote."""

    variable: str
    blocks: tuple[str, ...]
    at: tuple[int, ...]
    heights: tuple[int, ...] | None = None


class Failure:
    """The first error of the background threads of one communicator. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[str, BaseException] | None = None
        self._was_raised = False

    def record(self, doing: str, error: BaseException) -> None:
        """Keep an error, if it is the first one."""
        with self._lock:
            if self._first is None:
                self._first = (doing, error)

    @property
    def happened(self) -> bool:
        """Whether there was one."""
        return self._first is not None

    def check(self) -> None:
        """Raise the error, as a new exception that names what was being done."""
        with self._lock:
            if self._first is None:
                return
            self._was_raised = True
            doing, error = self._first
        text = f"{doing} failed in the background: {error}"
        if isinstance(error, PenstockError):
            raise type(error)(text, **error.fields) from error
        raise Bug(f"{text} ({type(error).__name__})") from error

    def check_unless_raised(self) -> None:
        """Raise the error if nobody has seen it yet."""
        if not self._was_raised:
            self.check()


class OverServers:
    """Base of the communicators: what goes to the servers as it comes."""

    def __init__(self, servers: Servers, descriptor: Descriptor, *, counters: Counters) -> None:
        self.servers, self.descriptor = servers, descriptor
        # Rows of peer '': what this trainer did before anything went to a server.
        self.counters = counters
        self._failure = Failure()
        self._is_closed = False

    def prefetch(
        self, table: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], ids: Any, out: Any
    ) -> None:
        """Pull rows: the step waits for them, so nothing is gained by a thread."""
        self._check()
        self.servers.prefetch(table, blocks, at, heights, ids, out)

    def send_barrier(self) -> None:
        """Nobody waits for anybody at a barrier."""
        self._check()

    def fetch_barrier(self) -> None:
        """Nobody waits for anybody at a barrier."""
        self._check()

    def geo(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], parameter: Any, rows: Any
    ) -> None:
        """Refuse: only GEO's communicator knows what to do."""
        raise Bug(f"the geo operator of {variable!r} ran in a program of {self.descriptor.mode} mode")

    def _check(self) -> None:
        self._failure.check()
        if self._is_closed:
            raise Unavailable("the communicator is stopped")

    def _where(self, at: Sequence[int]) -> str:
        """Return the endpoints of a variable, for an error message."""
        known = self.descriptor.endpoints
        return ", ".join(dict.fromkeys(known[i] if i < len(known) else f"server {i}" for i in at))
