"""Run migrations on the connection that the server gives, or, from the `alembic` command, on the settings' database."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy.engine import Connection

from penstock_server.db import Database
from penstock_server.settings import Settings
from penstock_server.tables import Base


def run(connection: Connection) -> None:
    """Run the migrations that the command asked for."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_alone() -> None:
    """Open the database of the settings, and migrate it."""
    settings = Settings()
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = Database(settings.url)
    try:
        async with database.engine.begin() as connection:
            await connection.run_sync(run)
    finally:
        await database.close()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_alone())
