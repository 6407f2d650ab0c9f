"""Inserts of many rows of plain values: SQLAlchemy writes the statement, and the driver gets the values as they are.

What `execute` does for each row takes the event loop as long as the database takes to store it. PostgreSQL gets all
rows by one statement, a list for each column: by one execution for each row it takes several times as long, during
which the transaction holds the lock of writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Dialect, String, Table, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from penstock_server.tables import Base

Insert = sqlite.Insert | postgresql.Insert
MOST_ROWS = 10_000
"""Of one statement on PostgreSQL: after hours without it millions wait, and a message has at most 1 GB."""
Completed = Callable[[Insert], Insert]
"""Adds to an insert what is done with rows that are there already."""


class Bulk:
    """An insert and the order of its rows. `names`: the columns that are inserted, at least two; each row is a tuple
    of their values.

    The driver has to take the values as they are: numbers and text, no JSON and no times. Rows of one call have
    different keys if `completed` updates rows that are there.
    """

    def __init__(self, row: type[Base], completed: Completed, names: Sequence[str], dialect: Dialect) -> None:
        table = row.__table__
        assert isinstance(table, Table)
        self._run = (
            _by_row(completed(sqlite.insert(table)), names, dialect)
            if dialect.name == "sqlite"
            else _by_column(table, completed, names)
        )

    async def run(self, connection: AsyncConnection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows; without any nothing is executed."""
        if rows:
            await self._run(connection, rows)


_Run = Callable[[AsyncConnection, Sequence[tuple[Any, ...]]], Awaitable[None]]


def _by_row(statement: Insert, names: Sequence[str], dialect: Dialect) -> _Run:
    compiled = statement.compile(dialect=dialect, column_keys=list(names))
    order = compiled.positiontup or ()  # a value of the statement itself may stand at several places
    pick = itemgetter(*(names.index(name) for name in order if name in names))
    rest = tuple(compiled.params[name] for name in order if name not in names)
    assert [name in names for name in order] == [True] * len(names) + [False] * len(rest)

    async def run(connection: AsyncConnection, rows: Sequence[tuple[Any, ...]]) -> None:
        await connection.exec_driver_sql(compiled.string, [pick(one) + rest for one in rows])

    return run


def _by_column(table: Table, completed: Completed, names: Sequence[str]) -> _Run:
    """PostgreSQL reads the lists side by side, as long as all are of the same length."""
    columns = [func.unnest(bindparam(f"all_{name}", type_=_list_of(table, name))).label(name) for name in names]
    statement = completed(postgresql.insert(table).from_select(list(names), select(*columns)))

    async def run(connection: AsyncConnection, rows: Sequence[tuple[Any, ...]]) -> None:
        for start in range(0, len(rows), MOST_ROWS):
            lists = zip(names, zip(*rows[start : start + MOST_ROWS], strict=True), strict=True)
            await connection.execute(statement, {f"all_{name}": list(values) for name, values in lists})

    return run


def _list_of(table: Table, name: str) -> postgresql.ARRAY[Any]:
    """Return the type of a list of a column's values. Text without its length: a cast would cut what is longer."""
    type_ = table.c[name].type
    return postgresql.ARRAY(String() if isinstance(type_, String) else type_)
