"""A background loop: run a step when woken or when its time has come; record what fails, and go on.

A step that raises is logged and tried again after a pause; one bad row never ends a pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)

FAILURE_PAUSE_S = 1.0


class Loop:
    """One pipeline. `wake()` may be called from anywhere in the event loop, any number of times.

    `rest_s`: least time between two steps, so that a burst of wakes costs few of them.
    """

    def __init__(
        self, name: str, step: Callable[[], Awaitable[object]], *, every_s: float, rest_s: float = 0.0
    ) -> None:
        self.name, self._step, self._every_s, self._rest_s = name, step, every_s, rest_s
        self._event = asyncio.Event()
        self.failures = 0
        self._stopping = False

    def wake(self) -> None:
        """Have the step run soon."""
        self._event.set()

    def stop(self) -> None:
        """Have the loop end after the step that runs."""
        self._stopping = True
        self._event.set()

    async def run(self) -> None:
        """Run until stopped; a step that runs is never cancelled, because it may be in a transaction."""
        while not self._stopping:
            self._event.clear()
            try:
                await self._step()
            except Exception:  # a boundary: recorded and tried again
                self.failures += 1
                log.exception("pipeline step failed", pipeline=self.name)
                await self._pause(FAILURE_PAUSE_S)
            else:
                await self._pause(self._every_s)
                if self._rest_s and not self._stopping:
                    await asyncio.sleep(self._rest_s)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(0 if self._stopping else seconds):
                await self._event.wait()
        except TimeoutError:
            return
