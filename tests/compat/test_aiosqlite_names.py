"""Contracts of aiosqlite's private names, and of what SQLAlchemy does with a cursor, on a real file."""

from __future__ import annotations

import asyncio
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


@asynccontextmanager
async def counted_turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[object]]:
    """Note each turn of a connection's thread."""
    turns: list[object] = []
    run: Callable[..., Awaitable[object]] = Connection._execute

    async def noted(self: Connection, *arguments: object, **named: object) -> object:
        turns.append(arguments)
        return await run(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_execute", noted)
        yield turns


INSERT = text("INSERT INTO t (a, b) VALUES (:a, :b)")


async def _what_gives_no_result_takes_no_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with database(folder) as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        async with counted_turns(monkeypatch) as turns:
            await connection.execute(INSERT, [{"a": number, "b": "x"} for number in range(3)])
            await connection.execute(INSERT, {"a": 3, "b": "x"})
            assert turns == []
            assert (await connection.execute(text("SELECT count(*) FROM t"))).scalar_one() == 4
            assert len(turns) == 1
            await connection.execute(INSERT, {"a": 4, "b": "x"})
            await connection.commit()
            assert len(turns) == 2
            await connection.rollback()  # there is nothing to roll back
            await connection.exec_driver_sql("BEGIN")
            await connection.commit()
            assert len(turns) == 2
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        await connection.execute(INSERT, {"a": 5, "b": "dropped"})
        await connection.rollback()
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        await connection.execute(INSERT, {"a": 6, "b": "undone"})
        assert (await connection.execute(text("SELECT count(*) FROM t"))).scalar_one() == 6
        await connection.rollback()
        assert list((await connection.execute(text("SELECT a FROM t"))).scalars()) == [0, 1, 2, 3, 4]
    await _errors_come_with_the_next_turn(folder / "errors.db")
    await _a_cancelled_turn_is_rolled_back(folder / "cancelled.db")
    await _a_connection_keeps_no_process(folder, monkeypatch)


async def _errors_come_with_the_next_turn(path: Path) -> None:
    connection = await connect(str(path))
    insert = "INSERT INTO t (a) VALUES (?)"
    async with connection.cursor() as cursor:
        await cursor.execute("CREATE TABLE t (a INTEGER PRIMARY KEY)")
        for ends in (connection.commit, partial(cursor.execute, "SELECT a FROM t")):
            for sql, row in (("BEGIN IMMEDIATE", ()), (insert, (1,)), (insert, (1,))):
                await cursor.execute(sql, row)
            with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
                await ends()
            await connection.rollback()
            await cursor.execute("SELECT count(*) FROM t")
            assert await cursor.fetchall() == [(0,)]
    await connection.close()


async def _a_cancelled_turn_is_rolled_back(path: Path) -> None:
    """The thread goes on with what a cancelled task waited for: its transaction must not stay open."""
    connection = await connect(str(path))
    began, go_on = threading.Event(), threading.Event()

    def held() -> None:
        began.set()
        assert go_on.wait(60)

    turn = asyncio.create_task(connection.turn(held))
    await asyncio.to_thread(began.wait, 60)
    connection.defers("BEGIN IMMEDIATE", [()])
    async with connection.cursor() as cursor:
        waiting = asyncio.create_task(cursor.execute("CREATE TABLE t (a)"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    go_on.set()
    await turn
    await connection.rollback()
    assert not connection.in_transaction
    await connection.close()


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
    "Connection": _what_gives_no_result_takes_no_turn,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(CONTRACTS))
async def test_aiosqlite_keeps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await CONTRACTS[name](tmp_path, monkeypatch)


def test_every_name_of_aiosqlite_has_a_contract() -> None:
    assert {entry.name for entry in private_names.entries(Path(private.__file__))} == set(CONTRACTS)
