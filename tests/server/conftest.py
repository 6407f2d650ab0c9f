"""Fixtures of the server's tests: databases of both kinds, and a server on each."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
from sqlalchemy import text
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.server.postgres_cluster import Cluster, cluster, shared_cluster
from tests.support.databases import migrate

from penstock_server.db import Database
from penstock_worker import lease

# The default renderer of exceptions prints every local of every frame, which takes seconds.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


MIGRATED = "migrated"
"""A database of the newest schema, from which others are made."""


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a private cluster's maintenance database; the workers of a run share it."""

    async def migrated(url: str) -> None:
        await _administer(url, f"CREATE DATABASE {MIGRATED}")
        await migrate(_named(url, MIGRATED))

    base = tmp_path_factory.getbasetemp()
    meeting = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with shared_cluster(meeting, lambda made: asyncio.run(migrated(made.url))) as made:
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
    async with _database(postgres, template="template1") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest) -> str | None:
    """Return the URL of a database of the newest schema, once of each kind; None: the SQLite of `running`."""
    url: str | None = request.getfixturevalue("postgres_copy") if request.param == "postgresql" else None
    return url


@pytest_asyncio.fixture
async def postgres_copy(postgres: str) -> AsyncIterator[str]:
    """Return the URL of a database of PostgreSQL with the newest schema."""
    async with _database(postgres, template=MIGRATED) as url:
        yield url


@asynccontextmanager
async def _database(maintenance: str, *, template: str) -> AsyncIterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    await _administer(maintenance, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield _named(maintenance, name)
    finally:
        await _administer(maintenance, f"DROP DATABASE {name} WITH (FORCE)")


def _named(maintenance: str, name: str) -> str:
    return maintenance.replace("/postgres?", f"/{name}?")


async def _administer(maintenance: str, statement: str) -> None:
    admin = Database(maintenance)
    try:
        async with admin.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            await connection.execute(text(statement))
    finally:
        await admin.close()


@pytest_asyncio.fixture
async def server(migrated_url: str | None, tmp_path: Path) -> AsyncIterator[Server]:
    """A server on each kind of database."""
    async with running(settings_for(tmp_path, migrated_url)) as running_server:
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
