"""Bring the database to the newest schema when the server starts.

Two servers that start at once on one PostgreSQL do not migrate twice: an advisory lock is held for the
whole transaction. On SQLite the lock of the state folder (see `statedir`) already keeps a second one out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import Connection

from penstock.errors import Bug
from penstock_server.db import Database

_ADVISORY_KEY = 0x50454E53544F434B  # "PENSTOCK"


def script_location() -> Path:
    """Return the folder of the migrations: packaged in a wheel, `alembic/` in a checkout."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "migrations", here.parents[2] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise Bug(f"no migrations beside {here.parent}: the package is incomplete; install it again")


async def upgrade(database: Database, revision: str = "head") -> None:
    """Run the migrations up to `revision`, in one transaction."""
    await _run(database, lambda config: command.upgrade(config, revision))


async def downgrade(database: Database, revision: str) -> None:
    """Run the migrations down to `revision`, in one transaction."""
    await _run(database, lambda config: command.downgrade(config, revision))


async def _run(database: Database, action: Callable[[Config], None]) -> None:
    def on_connection(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
        config.attributes["connection"] = connection
        action(config)

    async with database.engine.execution_options(penstock_write=True).connect() as connection, connection.begin():
        if not database.is_sqlite:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
        await connection.run_sync(on_connection)
