"""SQLite's write-ahead log is copied beside the writer: no commit waits for the disk that the copy needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select, text, update
from tests.server.harness import running, settings_for
from tests.support.waiting import until_async

from penstock_server import db as databases
from penstock_server import runtime as runtimes
from penstock_server.db import Database, upgrade
from penstock_server.tables import CounterRow

pytestmark = pytest.mark.asyncio


async def write(database: Database, value: int) -> None:
    async with database.write() as tx:
        await tx.session.execute(update(CounterRow).values(value=value))


async def in_log(database: Database) -> tuple[int, int]:
    """Return how many pages the log has, and how many of them are in the file by now. It copies what it may."""
    async with database.glance() as session:
        _, pages, copied = (await session.execute(text("PRAGMA wal_checkpoint(PASSIVE)"))).one()
    return pages, copied


async def test_log_is_copied_while_a_transaction_is_open(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    database = Database(f"sqlite+aiosqlite:///{path}")
    await upgrade(database)
    await write(database, 1)
    async with database.write() as tx:
        await tx.session.execute(update(CounterRow).values(value=2))
        before = path.stat().st_mtime_ns
        await database.checkpoint()
        assert path.stat().st_mtime_ns > before
    pages, copied = await in_log(database)
    assert pages == copied
    await database.close()


async def test_log_that_grows_is_copied_without_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "WAL_PAGES", 0)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
    await upgrade(database)
    await write(database, 1)
    held: list[bool] = []
    copy = database._copy_log

    async def noted() -> int:
        held.append(database.lock._is_held)
        return await copy()

    monkeypatch.setattr(database, "_copy_log", noted)
    await database.checkpoint()
    assert held == [False, True]
    await database.checkpoint()
    assert held == [False, True], "nothing was committed since"
    await database.close()


async def test_server_copies_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "CHECKPOINT_EVERY_S", 0.01)
    async with running(settings_for(tmp_path)) as server:
        copied: list[int] = []
        copy = server.runtime.database._copy_log

        async def noted() -> int:
            copied.append(await copy())
            return copied[-1]

        monkeypatch.setattr(server.runtime.database, "_copy_log", noted)
        await server.submit()
        await until_async(lambda: bool(copied), "a copy of the log")
        async with server.runtime.database.glance() as session:
            limit = (await session.execute(text("PRAGMA wal_autocheckpoint"))).scalar_one()
            assert (await session.execute(select(CounterRow.name))).scalars().all()
        assert limit == databases.WAL_PAGES
