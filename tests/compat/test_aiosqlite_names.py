"""Contracts of aiosqlite's private names, and of what SQLAlchemy does with a cursor, on a real file."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from tools import private_names

from penstock.compat import aiosqlite as private
from penstock.compat.aiosqlite import PREFETCHED, Connection, connect

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT i FROM n"
SIZES = (0, 1, PREFETCHED - 1, PREFETCHED, PREFETCHED + 1, 3 * PREFETCHED + 7)


@asynccontextmanager
async def database(folder: Path) -> AsyncIterator[AsyncConnection]:
    """Open a new file through SQLAlchemy."""
    path = str(folder / "some.db")
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", async_creator=partial(connect, path))
    async with engine.connect() as connection:
        await connection.execute(text("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)"))
        yield connection
    await engine.dispose()


async def _every_row_comes_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with database(folder) as connection:
        for count in SIZES:
            statement = text(NUMBERS.format(count) if count else "SELECT a FROM t")
            expected = list(range(1, count + 1))
            assert list((await connection.execute(statement)).scalars()) == expected
            parts = [part async for part in (await connection.stream(statement)).scalars().partitions(300)]
            assert [one for part in parts for one in part] == expected
            assert all(len(part) == 300 for part in parts[:-1])
        found = await connection.stream(text(NUMBERS.format(5 * PREFETCHED)))
        assert (await found.fetchone()) == (1,)
        await found.close()
        await connection.execute(text("DROP TABLE t"))  # locked while a statement of this connection goes on


async def _a_statement_takes_one_turn_of_its_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = await connect(str(folder / "some.db"))
    turns = 0
    run: Callable[..., Awaitable[object]] = Connection._execute

    async def counted(self: Connection, *arguments: object, **named: object) -> object:
        nonlocal turns
        turns += 1
        return await run(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_execute", counted)
        async with connection.cursor() as cursor:
            await cursor.execute("SELECT 1, 2")
            assert (await cursor.fetchall(), [column[0] for column in cursor.description]) == ([(1, 2)], ["1", "2"])
    assert turns == 1
    await connection.close()
    async with database(folder) as through:
        rows = [{"b": str(number)} for number in range(5)]
        await through.execute(text("INSERT INTO t (b) VALUES (:b)"), rows)
        assert (await through.execute(text("UPDATE t SET b = 'x' WHERE a > 2"))).rowcount == 3
        returned = await through.execute(text("UPDATE t SET b = 'y' WHERE a > 3 RETURNING a"))
        assert sorted(returned.scalars()) == [4, 5]
        await through.commit()
        assert (await through.execute(text("SELECT count(*) FROM t"))).scalar_one() == 5
        with pytest.raises(OperationalError, match="no such table: absent"):
            await through.execute(text("SELECT 1 FROM absent"))


async def _a_connection_keeps_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    connection = await connect(str(folder / "some.db"))
    [mine] = set(threading.enumerate()) - before
    assert mine.daemon
    assert isinstance(connection.now(), sqlite3.Connection) and connection.now().isolation_level is None
    await connection.close()


CONTRACTS = {
    "PREFETCHED": _every_row_comes_once,
    "Cursor": _a_statement_takes_one_turn_of_its_thread,
    "Connection": _a_connection_keeps_no_process,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(CONTRACTS))
async def test_aiosqlite_keeps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await CONTRACTS[name](tmp_path, monkeypatch)


def test_every_name_of_aiosqlite_has_a_contract() -> None:
    assert {entry.name for entry in private_names.entries(Path(private.__file__))} == set(CONTRACTS)
