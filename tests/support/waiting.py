"""Waiting for what a test does not do itself: another thread, a process, a server. A limit stops a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

LIMIT_S = 60.0
"""Far more than anything takes on a busy machine."""
_POLL_S = 0.005
_LONGEST_POLL_S = 0.25


def pause_s(look_s: float) -> float:
    """Return how long to wait after a look that took so long: looking takes at most a fifth of a core."""
    return min(max(_POLL_S, 4 * look_s), _LONGEST_POLL_S)


T = TypeVar("T")


def until(condition: Callable[[], object], what: str = "the condition", limit_s: float = LIMIT_S) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + limit_s
    began = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(pause_s(now - began))
        began = time.monotonic()


async def until_async(condition: Callable[[], object], what: str = "the condition", limit_s: float = LIMIT_S) -> None:
    """Return when the condition holds; the event loop runs meanwhile."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        await asyncio.sleep(_POLL_S)


async def until_answer(get: Callable[[], Awaitable[T]], wanted: Callable[[T], bool], limit_s: float = LIMIT_S) -> T:
    """Ask until the answer is the wanted one, and return it. Fails with the last answer."""
    deadline = time.monotonic() + limit_s
    began = time.monotonic()
    while not wanted(answer := await get()):
        now = time.monotonic()
        assert now < deadline, f"not within {limit_s:g} s; the last answer was {answer!r}"
        await asyncio.sleep(pause_s(now - began))
        began = time.monotonic()
    return answer
