"""Many sessions at once on SQLite: each waits its turn, and none holds up a write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import event, select, text, update
from tests.support.waiting import until_async

from penstock_server.db import SQLITE_READERS, Database, upgrade
from penstock_server.tables import CounterRow

pytestmark = pytest.mark.asyncio

MANY = 5 * SQLITE_READERS


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    made = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
    await upgrade(made)
    yield made
    await made.close()


async def test_write_goes_on_while_more_read_than_may(database: Database) -> None:
    over, reading = asyncio.Event(), 0

    async def read() -> int:
        nonlocal reading
        async with database.read() as session:
            found: int = (await session.execute(select(CounterRow.value))).scalar_one()
            reading += 1
            await over.wait()
            return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read()) for _ in range(MANY)]
        await until_async(lambda: reading == SQLITE_READERS)
        async with asyncio.timeout(5), database.write() as tx:
            await tx.session.execute(update(CounterRow).values(value=7))
        assert reading == SQLITE_READERS
        over.set()
    found = [task.result() for task in tasks]
    assert (found.count(0), found.count(7)) == (SQLITE_READERS, MANY - SQLITE_READERS)


async def test_a_burst_of_readers_opens_no_connection_twice(database: Database) -> None:
    opened = 0

    def on_connect(*_: object) -> None:
        nonlocal opened
        opened += 1

    event.listen(database.engine.sync_engine, "connect", on_connect)

    async def read() -> None:
        async with database.glance() as session:
            await session.execute(text("SELECT 1"))

    for _ in range(3):
        await asyncio.gather(*(read() for _ in range(MANY)))
    assert opened <= SQLITE_READERS + 1
