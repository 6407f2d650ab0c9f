"""Group commit: what many tasks write at about the same time is written by one transaction.

A task that puts something gets its answer after the commit. The first one that waits starts a gathering of `gather_s`,
and while the transaction waits for the lock of writes, what comes joins it: the longer the line, the larger the group.
A transaction takes `most` of them, so that an urgent writer, which goes first, waits for one such group at most.
One event loop; at most one transaction at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from penstock_server.db import Database, DatabaseAway, TakenOver, Tx

T = TypeVar("T")
Outcome = Exception | None
Apply = Callable[[Tx, Sequence[T]], Awaitable[Sequence[Outcome]]]
"""Writes items in their order; returns for each what its task is to raise, if anything. Raising rolls all back."""


class GroupCommit(Generic[T]):
    """The line in front of one kind of write."""

    def __init__(self, database: Database, apply: Apply[T], *, most: int, gather_s: float) -> None:
        self._db, self._apply, self._most, self._gather_s = database, apply, most, gather_s
        self._waiting: deque[tuple[T, asyncio.Future[None]]] = deque()
        self._writer: asyncio.Task[None] | None = None

    async def put(self, item: T) -> None:
        """Return once an item is committed. Raises what `apply` has for it, or DatabaseAway.

        Cancelled before, the item may be written all the same.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._writer is None:
            # In a context of its own: it writes for many, and none of them is the request that is recorded.
            self._writer = asyncio.create_task(self._write_all(), name="group", context=contextvars.Context())
        await answer

    async def settled(self) -> None:
        """Return once nothing is being written."""
        while self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write_all(self) -> None:
        try:
            await asyncio.sleep(self._gather_s)
            while self._waiting:
                await self._write_group()
        finally:
            self._writer = None
            _answer_all(self._take_all(), DatabaseAway("the server stops"))  # none unless this task was cancelled

    async def _write_group(self) -> None:
        group: list[tuple[T, asyncio.Future[None]]] = []
        try:
            async with self._db.write() as tx:
                while self._waiting and len(group) < self._most:
                    group.append(self._waiting.popleft())
                outcomes = await self._apply(tx, [item for item, _ in group])
        except (DatabaseAway, TakenOver) as error:
            _answer_all(group or self._take_all(), error)
        except Exception as error:  # noqa: BLE001  # one item that cannot be written keeps no other from it
            if len(group) > 1:
                for item, answer in group:
                    await self._write_alone(item, answer)
            else:
                _answer_all(group or self._take_all(), error)
        else:
            for (_, answer), outcome in zip(group, outcomes, strict=True):
                _answer(answer, outcome)
        finally:
            _answer_all(group, DatabaseAway("the server stops"))  # none unless this task was cancelled

    async def _write_alone(self, item: T, answer: asyncio.Future[None]) -> None:
        try:
            async with self._db.write() as tx:
                [outcome] = await self._apply(tx, [item])
        except Exception as error:  # noqa: BLE001  # its task raises it
            outcome = error
        _answer(answer, outcome)

    def _take_all(self) -> list[tuple[T, asyncio.Future[None]]]:
        """Take what waits: no transaction has begun for it."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


def _answer_all(group: Sequence[tuple[T, asyncio.Future[None]]], outcome: Outcome) -> None:
    for _, answer in group:
        _answer(answer, outcome)


def _answer(answer: asyncio.Future[None], outcome: Outcome) -> None:
    if answer.done():  # its task was cancelled
        return
    if outcome is None:
        answer.set_result(None)
    else:
        answer.set_exception(outcome)
