"""Numbers that are given out once. Two transactions never get the same one."""

from __future__ import annotations

from sqlalchemy import update

from penstock.errors import Bug
from penstock_server.db import Tx
from penstock_server.tables import CounterRow


async def next_numbers(tx: Tx, name: str, count: int) -> int:
    """Reserve `count` numbers in a row; return the first. A rolled back transaction gives them back."""
    statement = (
        update(CounterRow)
        .where(CounterRow.name == name)
        .values(value=CounterRow.value + count)
        .returning(CounterRow.value)
    )
    last = (await tx.session.execute(statement)).scalar_one_or_none()
    if last is None:
        raise Bug(f"counter {name!r} is missing: the migrations did not run")
    return last - count + 1
