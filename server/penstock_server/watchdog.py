"""Reports an event loop that stalls: where it stands, from a thread that does not stand with it.

A stalled loop answers no heartbeat and no request, and its log says nothing. One line for each stall, with the stack of
the loop's thread while it lasts; the same place again within `REPEAT_S` is only counted.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from prometheus_client import Counter

log = structlog.get_logger(__name__)

TICK_S = 0.1
STALL_S = 1.0
REPEAT_S = 600.0
MAX_PLACES = 100


class Watchdog:
    """Watches the event loop that enters `watching`. `stalls`: counts them."""

    def __init__(self, stalls: Counter, *, stall_s: float = STALL_S, tick_s: float = TICK_S) -> None:
        self._stalls, self._stall_s, self._tick_s = stalls, stall_s, tick_s
        self._turned_at = time.monotonic()
        self._stop = threading.Event()
        self._said: dict[str, float] = {}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the block ends."""
        loop_thread = threading.get_ident()
        thread = threading.Thread(target=self._watch, args=(loop_thread,), name="penstock-watchdog", daemon=True)
        turning = asyncio.create_task(self._turn(), name="watchdog")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            turning.cancel()
            await asyncio.to_thread(thread.join)

    async def _turn(self) -> None:
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(self._tick_s)

    def _watch(self, loop_thread: int) -> None:
        reported_at = 0.0
        while not self._stop.wait(self._tick_s):
            turned_at = self._turned_at
            if time.monotonic() - turned_at < self._stall_s or turned_at == reported_at:
                continue
            reported_at = turned_at  # once for each stall
            self._stalls.inc()
            frame = sys._current_frames().get(loop_thread)
            self._report([] if frame is None else traceback.format_stack(frame))

    def _report(self, stack: list[str]) -> None:
        place, now = (stack or ["unknown"])[-1], time.monotonic()
        if now - self._said.get(place, -REPEAT_S) < REPEAT_S:
            return
        if len(self._said) >= MAX_PLACES:
            self._said.clear()
        self._said[place] = now
        log.warning("the event loop stalls", seconds=self._stall_s, stack="".join(stack))
