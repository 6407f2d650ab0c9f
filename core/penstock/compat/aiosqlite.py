"""Private names of aiosqlite that the control plane needs: the only module that may touch one.

Invariant: as in `penstock.compat`; the contract tests are in `tests/compat/test_aiosqlite_names.py`. A leaf that needs
no torch. Imported by `penstock_server` alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, cast

import aiosqlite

PREFETCHED = 1000
"""Rows that come with the statement. A result of more is read on as it is asked for, so that not all is in memory."""


class Cursor(aiosqlite.Cursor):
    """Executes a statement and fetches its rows in one turn of the connection's thread.

    SQLAlchemy's adapter takes four: to make the cursor, execute, fetch and close. Each waits for the interpreter's lock
    and for the event loop, which on a busy server is most of what a statement takes.
    """

    def __init__(self, connection: Connection) -> None:
        self.iter_chunk_size = PREFETCHED
        self._conn: Connection = connection
        self._cursor: sqlite3.Cursor
        self._rows: list[Any] = []
        self._has_more = False

    async def execute(self, sql: str, parameters: Iterable[Any] | None = None) -> Cursor:
        """Execute a statement, and fetch its first rows."""
        await self._in_thread(self._execute_now, sql, () if parameters is None else parameters)
        return self

    async def executemany(self, sql: str, parameters: Iterable[Iterable[Any]]) -> Cursor:
        """Execute a statement once for each set of parameters."""
        await self._in_thread(self._execute_many_now, sql, parameters)
        return self

    async def fetchone(self) -> Any:
        """Return the next row, or None."""
        rows = await self.fetchmany(1)
        return rows[0] if rows else None

    async def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return the next rows, at most `size` (default: 1)."""
        size = 1 if size is None else size
        while len(self._rows) < size and self._has_more:
            await self._in_thread(self._fetch_now, PREFETCHED)
        rows, self._rows = self._rows[:size], self._rows[size:]
        return rows

    async def fetchall(self) -> list[Any]:
        """Return all rows that are left."""
        rows, self._rows = self._rows, []
        if self._has_more:
            self._has_more = False
            rows += await self._in_thread(self._cursor.fetchall)
        return rows

    async def close(self) -> None:
        """End the statement, if it has more rows; one that has none is over."""
        self._rows = []
        if self._has_more:
            self._has_more = False
            await self._in_thread(self._cursor.close)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await cast("Callable[..., Awaitable[Any]]", self._execute)(function, *arguments)

    def _execute_now(self, sql: str, parameters: Iterable[Any]) -> None:
        self._cursor = self._conn.now().execute(sql, tuple(parameters))
        if self._cursor.description is not None:
            self._fetch_now(PREFETCHED)

    def _execute_many_now(self, sql: str, parameters: Iterable[Iterable[Any]]) -> None:
        self._cursor = self._conn.now().executemany(sql, [tuple(one) for one in parameters])

    def _fetch_now(self, size: int) -> None:
        rows = self._cursor.fetchmany(size)
        self._rows += rows
        self._has_more = len(rows) == size


class Connection(aiosqlite.Connection):
    """A connection whose statements take one turn of its thread each."""

    def now(self) -> sqlite3.Connection:
        """Return the connection that belongs to the thread."""
        return self._conn

    def cursor(self) -> Any:
        """Return a cursor. SQLAlchemy enters it as a context, which aiosqlite's is awaited for."""
        return Cursor(self)


async def connect(path: str) -> Connection:
    """Open a file in a thread of its own, which does not keep the process. Nothing begins a transaction by itself."""
    made = Connection(partial(sqlite3.connect, path, isolation_level=None, check_same_thread=False), PREFETCHED)
    made._thread.daemon = True
    await made
    return made
