"""Statements of SQL that servers of one process compile once, not each for itself: a fifth of what a short test takes.

A server that runs for long compiles each statement once; a test's server ends before that pays. SQLAlchemy keeps what
it has compiled by engine and dialect, so the engines of one kind of database get the same of both.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from penstock_server import db


class Compiled:
    """Makes engines that share what they have compiled."""

    def __init__(self) -> None:
        self._dialects: dict[str, list[Dialect]] = defaultdict(list)
        self._statements: dict[str, dict[Any, Any]] = defaultdict(dict)

    def engine(self, url: str, **options: Any) -> AsyncEngine:
        """As SQLAlchemy's function."""
        made = create_async_engine(url, **options)
        own = made.sync_engine.dialect
        kind = f"{own.name}+{own.driver}"
        # a dialect knows the version of its database once an engine of its own has connected
        ready = next((one for one in self._dialects[kind] if one.server_version_info is not None), None)
        if ready is None:
            self._dialects[kind].append(own)
        else:
            made.sync_engine.dialect = ready
            made.sync_engine.update_execution_options(compiled_cache=self._statements[kind])
        return made


def share() -> None:
    """Have all databases of this process that are opened from now on share their statements. Idempotent."""
    names = vars(db)
    if names["create_async_engine"] is create_async_engine:
        names["create_async_engine"] = Compiled().engine
