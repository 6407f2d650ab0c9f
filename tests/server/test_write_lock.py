"""Whose turn it is to write: requests first, and no writer waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from penstock_server.writelock import OVERTAKEN_S, WriteLock

pytestmark = pytest.mark.anyio


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def turns(lock: WriteLock, clock: Clock, line: list[tuple[str, bool]], *, held_s: float = 0.0) -> list[str]:
    """Return the order in which writers that came one after another, while the lock was held, had their turns."""
    done: list[str] = []

    async def write(name: str, urgent: bool) -> None:
        async with lock.turn(urgent=urgent):
            done.append(name)

    async with lock.turn(urgent=False):
        tasks = []
        for name, urgent in line:
            tasks.append(asyncio.create_task(write(name, urgent)))
            await asyncio.sleep(0)
        assert lock.num_waiting == len(line)
        clock.now += held_s
    await asyncio.gather(*tasks)
    return done


async def test_urgent_writers_go_first_and_each_line_in_order() -> None:
    clock = Clock()
    line = [("flush", False), ("sweep", False), ("submit", True), ("cancel", True)]
    assert await turns(WriteLock(clock=clock), clock, line) == ["submit", "cancel", "flush", "sweep"]


async def test_writer_that_has_waited_long_is_not_overtaken_again() -> None:
    clock = Clock()
    line = [("flush", False), ("submit", True)]
    clock.now = 1.0
    lock = WriteLock(clock=clock)
    assert await turns(lock, clock, line) == ["submit", "flush"]

    async def submit_late() -> None:
        async with lock.turn(urgent=True):
            done.append("late")

    done: list[str] = []
    async with lock.turn(urgent=False):
        flush = asyncio.create_task(_note(lock, done, "flush"))
        await asyncio.sleep(0)
        clock.now += OVERTAKEN_S
        late = asyncio.create_task(submit_late())
        await asyncio.sleep(0)
    await asyncio.gather(flush, late)
    assert done == ["flush", "late"]


async def _note(lock: WriteLock, done: list[str], name: str) -> None:
    async with lock.turn(urgent=False):
        done.append(name)


async def test_cancelled_writer_leaves_the_line_or_passes_its_turn_on() -> None:
    lock, done = WriteLock(), list[str]()
    async with lock.turn(urgent=False):
        tasks = [asyncio.create_task(_note(lock, done, str(number))) for number in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        tasks[1].cancel()  # it is in the line still
    tasks[2].cancel()  # it has the turn, and has not run yet
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["3"]
    assert lock.num_waiting == 0
    async with asyncio.timeout(5), lock.turn(urgent=False):
        pass


async def test_error_in_a_turn_frees_the_lock() -> None:
    lock = WriteLock()
    with pytest.raises(ValueError, match="x"):
        async with lock.turn(urgent=True):
            raise ValueError("x")
    async with asyncio.timeout(5), lock.turn(urgent=False):
        pass
