"""The lock of write transactions: one at a time, and urgent ones go before all others.

Urgent are submissions, cancellations and what is wanted of a node; other requests wait in line with reports, passes of
the scheduler and metrics. A writer that has waited for `OVERTAKEN_S` goes before every later one, so that a stream of
urgent ones delays no other for long. One event loop; a turn is handed over directly, so none is overtaken by a task
that comes just then.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

OVERTAKEN_S = 0.25


class WriteLock:
    """Whose turn it is. `num_waiting`: writers in line."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_held = False
        self._urgent: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._others: deque[tuple[float, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Return how many writers are in line."""
        return len(self._urgent) + len(self._others)

    @asynccontextmanager
    async def turn(self, *, urgent: bool) -> AsyncIterator[None]:
        """Hold the lock while the block runs. Cancelled while it waits, a task leaves the line."""
        if self._is_held:
            await self._wait(self._urgent if urgent else self._others)
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, line: deque[tuple[float, asyncio.Future[None]]]) -> None:
        place = (self._clock(), asyncio.get_running_loop().create_future())
        line.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if not place[1].cancelled():  # its turn had come
                self._pass_on()
            elif place in line:
                line.remove(place)
            raise

    def _pass_on(self) -> None:
        """Hand the lock to the next in line, or set it free."""
        while (line := self._next_line()) is not None:
            future = line.popleft()[1]
            if not future.done():  # else it was cancelled just now
                future.set_result(None)
                return
        self._is_held = False

    def _next_line(self) -> deque[tuple[float, asyncio.Future[None]]] | None:
        if self._urgent and self._others:
            is_due = self._clock() - self._others[0][0] >= OVERTAKEN_S and self._others[0][0] < self._urgent[0][0]
            return self._others if is_due else self._urgent
        return self._urgent or self._others or None
