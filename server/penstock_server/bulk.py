"""Inserts of many rows of plain values: SQLAlchemy writes the statement, and the driver gets the rows as they are.

What `execute` does for each row takes the event loop as long as the database takes to store it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

Insert = sqlite.Insert | postgresql.Insert


class Bulk:
    """A statement and the order of its rows. `names`: the columns that are inserted, at least two; each row is a tuple
    of their values.

    The driver has to take the values as they are: numbers and text, no JSON and no times.
    """

    def __init__(self, statement: Insert, names: Sequence[str], dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=list(names))
        order = compiled.positiontup or ()  # a value of the statement itself may stand at several places
        self._sql = compiled.string
        self._row = itemgetter(*(names.index(name) for name in order if name in names))
        self._rest = tuple(compiled.params[name] for name in order if name not in names)
        assert [name in names for name in order] == [True] * len(names) + [False] * len(self._rest)

    async def run(self, connection: AsyncConnection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows; without any nothing is executed."""
        if rows:
            row, rest = self._row, self._rest
            await connection.exec_driver_sql(self._sql, [row(one) + rest for one in rows])
