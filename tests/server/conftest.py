"""Fixtures of the server's tests: databases of both kinds, and a server on each."""

from __future__ import annotations

import sys
import uuid
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
from sqlalchemy import text
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.server.postgres_cluster import Cluster, cluster

from penstock_server.db import Database
from penstock_worker import lease

# The default renderer of exceptions prints every local of every frame, which takes seconds.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Return the URL of a private cluster's maintenance database."""
    with cluster() as made:
        yield made.url


@pytest.fixture
def postgres_apart() -> Iterator[Cluster]:
    """A cluster that the test may stop."""
    with cluster() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'test.db'}"
    url: str = request.getfixturevalue("postgres_database")
    return url


@pytest_asyncio.fixture
async def postgres_database(postgres: str) -> AsyncIterator[str]:
    """Return the URL of an empty database of PostgreSQL."""
    maintenance = postgres
    name = f"test_{uuid.uuid4().hex}"
    admin = Database(maintenance)
    autocommit = admin.engine.execution_options(isolation_level="AUTOCOMMIT")
    async with autocommit.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield maintenance.replace("/postgres?", f"/{name}?")
    finally:
        async with autocommit.connect() as connection:
            await connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        await admin.close()


@pytest_asyncio.fixture
async def server(database_url: str, tmp_path: Path) -> AsyncIterator[Server]:
    """A server on each kind of database."""
    async with running(settings_for(tmp_path, database_url)) as running_server:
        yield running_server


@pytest_asyncio.fixture
async def sqlite_server(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """A server on SQLite, for behaviour that the database has no part in. Its parameter: settings that are changed."""
    async with running(settings_for(tmp_path, **getattr(request, "param", {}))) as running_server:
        yield running_server


@pytest_asyncio.fixture
async def node(sqlite_server: Server, tmp_path: Path) -> AsyncIterator[Path]:
    """A real agent; its state folder."""
    state = tmp_path / "agent"
    state.mkdir()
    node_id, token = await sqlite_server.join(cpus=8)  # by hand: a machine with few cores holds no whole group
    lease.write_json(state / "node.json", {"url": sqlite_server.url, "node_id": node_id, "token": token})
    process = await create_subprocess_exec(
        sys.executable, "-m", "penstock_worker", "--state-dir", str(state), stderr=DEVNULL
    )
    yield state
    process.terminate()
    await process.wait()


@pytest.fixture
def clock() -> FakeClock:
    """Time that the test moves."""
    return FakeClock()
