"""Databases of servers that tests start: a file of SQLite with the newest schema, made once in a process and copied.

The migrations of each start add up. Those of an empty folder have tests of their own.
"""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.support.statements import share

from penstock_server.db import Database, upgrade

share()


async def migrate(url: str) -> None:
    """Bring a database to the newest schema."""
    database = Database(url)
    try:
        await upgrade(database)
    finally:
        await database.close()


def lay_database(state_dir: Path) -> None:
    """Put an empty database into the folder of a server that has not started yet. No-op if it has one."""
    target = state_dir / "penstock.db"
    if not target.exists():
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.touch(mode=0o600)
        target.write_bytes(_migrated())


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
        made = Path(folder) / "penstock.db"
        thread.submit(asyncio.run, migrate(f"sqlite+aiosqlite:///{made}")).result()
        return made.read_bytes()
