"""Private names of aiosqlite that the control plane needs: the only module that may touch one.

Invariant: as in `penstock.compat`; the contract tests are in `tests/compat/test_aiosqlite_names.py`. A leaf that needs
no torch. Imported by `penstock_server` alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import aiosqlite

PREFETCHED = 1000
"""Rows that come with the statement. A result of more is read on as it is asked for, so that not all is in memory."""


class Cursor(aiosqlite.Cursor):
    """Executes a statement and fetches its rows in one turn of the connection's thread.

    SQLAlchemy's adapter takes four: to make the cursor, execute, fetch and close. Each waits for the interpreter's lock
    and for the event loop, which on a busy server is most of what a statement takes. One that gives no result takes
    none of its own (`Connection`).
    """

    def __init__(self, connection: Connection) -> None:
        self.iter_chunk_size = PREFETCHED
        self._conn: Connection = connection
        self._cursor: sqlite3.Cursor
        self._rows: list[Any] = []
        self._has_more = self._is_deferred = False

    @property
    def description(self) -> Any:
        """Return what describes the columns; None for a statement without rows."""
        return None if self._is_deferred else self._cursor.description

    @property
    def rowcount(self) -> int:
        """Return how many rows were changed; -1, not known, of a statement that was deferred."""
        return -1 if self._is_deferred else self._cursor.rowcount

    async def execute(self, sql: str, parameters: Iterable[Any] | None = None) -> Cursor:
        """Execute a statement, and fetch its first rows."""
        row = () if parameters is None else tuple(parameters)
        self._is_deferred = self._conn.defers(sql, [row])
        if not self._is_deferred:
            await self._conn.turn(self._execute_now, sql, row)
        return self

    async def executemany(self, sql: str, parameters: Iterable[Iterable[Any]]) -> Cursor:
        """Execute a statement once for each set of parameters."""
        rows = [tuple(one) for one in parameters]
        self._is_deferred = self._conn.defers(sql, rows)
        if not self._is_deferred:
            await self._conn.turn(self._execute_many_now, sql, rows)
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

    def _execute_now(self, sql: str, row: tuple[Any, ...]) -> None:
        self._cursor = self._conn.now().execute(sql, row)
        if self._cursor.description is not None:
            self._fetch_now(PREFETCHED)

    def _execute_many_now(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._cursor = self._conn.now().executemany(sql, rows)

    def _fetch_now(self, size: int) -> None:
        rows = self._cursor.fetchmany(size)
        self._rows += rows
        self._has_more = len(rows) == size


class Connection(aiosqlite.Connection):
    """A connection whose statements take one turn of its thread each, and those that give no result none.

    BEGIN, and an INSERT without RETURNING within a transaction, are deferred: they are executed, in their order, in the
    turn of the next statement that gives a result, or of COMMIT. That one raises what they raise. So a transaction that
    looks something up and inserts rows in five tables takes two turns, and one that only inserts takes one. A
    transaction of which nothing was executed ends without a turn.
    """

    def __init__(self, connector: Callable[[], sqlite3.Connection], iter_chunk_size: int) -> None:
        super().__init__(connector, iter_chunk_size)
        self._deferred: list[tuple[str, Sequence[tuple[Any, ...]]]] = []
        self._has_begun = False  # a transaction, whose BEGIN may be deferred still
        self._has_run = False  # its BEGIN went to the thread

    def now(self) -> sqlite3.Connection:
        """Return the connection that belongs to the thread."""
        return self._conn

    def cursor(self) -> Any:
        """Return a cursor. SQLAlchemy enters it as a context, which aiosqlite's is awaited for."""
        return Cursor(self)

    def defers(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Defer a statement if it has no result; return whether it was."""
        begins = sql.startswith("BEGIN")
        if not begins and not (self._has_begun and sql.startswith("INSERT INTO ") and "RETURNING" not in sql):
            return False
        self._has_begun = True
        self._deferred.append((sql, rows))
        return True

    async def turn(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Execute what was deferred and then a function, in one turn of the thread."""
        deferred, self._deferred = self._deferred, []
        self._has_run = self._has_begun  # also if this task is cancelled: the thread goes on
        return await cast("Callable[..., Awaitable[Any]]", self._execute)(self._run, deferred, function, arguments)

    async def commit(self) -> None:
        """Commit; what was deferred is executed before. If that fails, all is rolled back: SQLAlchemy does not."""
        deferred, is_empty = self._deferred, not self._has_run and len(self._deferred) < 2
        self._ended()  # also if this task is cancelled: the thread goes on
        if not is_empty:
            await cast("Callable[..., Awaitable[Any]]", self._execute)(self._commit_now, deferred)

    async def rollback(self) -> None:
        """Roll back; what was deferred is dropped."""
        has_run = self._has_run
        self._ended()  # also if this task is cancelled: the thread goes on
        if has_run:
            await cast("Callable[..., Awaitable[Any]]", self._execute)(self.now().rollback)

    def _ended(self) -> None:
        self._deferred, self._has_begun, self._has_run = [], False, False

    def _commit_now(self, deferred: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> None:
        try:
            self._run(deferred, self._conn.commit, ())
        except BaseException:
            self._conn.rollback()
            raise

    def _run(
        self,
        deferred: Sequence[tuple[str, Sequence[tuple[Any, ...]]]],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        for sql, rows in deferred:
            if len(rows) == 1:
                self._conn.execute(sql, rows[0])
            else:
                self._conn.executemany(sql, rows)
        return function(*arguments)


async def connect(path: str) -> Connection:
    """Open a file in a thread of its own, which does not keep the process. Nothing begins a transaction by itself."""
    made = Connection(partial(sqlite3.connect, path, isolation_level=None, check_same_thread=False), PREFETCHED)
    made._thread.daemon = True
    await made
    return made
