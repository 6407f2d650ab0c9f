"""Migrations on SQLite and PostgreSQL: up, down, up; and they make exactly what the rows say."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, select, text
from sqlalchemy.engine import Connection
from tests.server.harness import settings_for

from penstock.errors import Unavailable
from penstock_server.db import Database, downgrade, newest_revision, script_location, upgrade
from penstock_server.runtime import open_runtime
from penstock_server.tables import Base, JobRow, WebhookDeliveryRow, WebhookRow

pytestmark = pytest.mark.asyncio
JOB = text(
    "INSERT INTO jobs (id, name, kind, state, reason, reason_detail, why, spec, epoch, attempt, restarts, "
    "created_at, state_at, latest, lost, version) VALUES (:id, 'j', 'managed', :state, '', '', '', :spec, 1, 1, 0, "
    "'2026-01-01 00:00:00', '2026-01-01 00:00:00', '{}', '{}', 1)"
)


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    yield found
    await found.close()


async def tables(database: Database) -> set[str]:
    async with database.engine.connect() as connection:
        names: list[str] = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    return set(names) - {"alembic_version"}


async def test_up_down_up(database: Database) -> None:
    await upgrade(database)
    assert await tables(database) == set(Base.metadata.tables)
    await downgrade(database, "base")
    assert await tables(database) == set()
    await upgrade(database)
    async with database.engine.connect() as connection:
        assert (await connection.execute(text("SELECT name, value FROM counters"))).all() == [("stream", 0)]


async def test_attempts_that_go_on_keep_their_limit(database: Database) -> None:
    await upgrade(database, "0009")
    attempt = (
        "INSERT INTO attempts (id, job_id, number, epoch, created_at, reason, secret) "
        "VALUES (:id, :id, 1, 1, '2026-01-01 00:00:00', '', '')"
    )
    async with database.engine.begin() as connection:
        for name, spec in (("long", "{}"), ("short", '{"max_duration_s": 90.5}')):
            await connection.execute(JOB, {"id": name, "state": "RUNNING", "spec": spec})
            await connection.execute(text(attempt), {"id": name})
    await upgrade(database)
    async with database.read() as session:
        rows = await session.execute(select(JobRow.id, JobRow.created_at, JobRow.ends_by))
        found = {row.id: row.ends_by and row.ends_by - row.created_at for row in rows}
    assert found == {"long": None, "short": timedelta(seconds=90.5)}


async def test_counts_of_streams_begin_anew_after_a_downgrade(database: Database) -> None:
    await upgrade(database)
    counts = "INSERT INTO stream_counts (stream, job_id, counts) VALUES (5000000000, 'j', '{}')"
    async with database.engine.begin() as connection:
        await connection.execute(JOB, {"id": "j", "state": "RUNNING", "spec": "{}"})
        await connection.execute(text(counts))
    await downgrade(database, "0018")
    assert "stream_counts" not in await tables(database)
    await upgrade(database)
    async with database.engine.connect() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM stream_counts"))).scalar_one() == 0
        assert (await connection.execute(text("SELECT id FROM jobs"))).scalar_one() == "j"


async def test_specs_lose_node_selectors_with_their_migration(database: Database) -> None:
    await upgrade(database)
    async with database.engine.begin() as connection:
        for name, spec in (("new", '{"name": "a", "node_selector": {"gpu": "a100"}}'), ("old", '{"name": "b"}')):
            await connection.execute(JOB, {"id": name, "state": "QUEUED", "spec": spec})
    await downgrade(database, "0017")
    async with database.engine.connect() as connection:
        rows = (await connection.execute(text("SELECT id, spec FROM jobs"))).all()
    assert {i: json.loads(v) if isinstance(v, str) else v for i, v in rows} == {
        "new": {"name": "a"},
        "old": {"name": "b"},
    }


async def test_waiting_jobs_lose_the_limit_of_their_attempt(database: Database) -> None:
    await upgrade(database, "0015")
    async with database.engine.begin() as connection:
        for state in ("RECOVERING", "RUNNING"):
            await connection.execute(JOB, {"id": state, "state": state, "spec": "{}"})
        await connection.execute(text("UPDATE jobs SET ends_by = '2026-01-02 00:00:00'"))
    await upgrade(database)
    async with database.read() as session:
        rows = await session.execute(select(JobRow.id, JobRow.ends_by))
        assert {row.id: row.ends_by is None for row in rows} == {"RECOVERING": True, "RUNNING": False}


async def test_webhooks_go_with_their_migration(database: Database) -> None:
    await upgrade(database)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    async with database.write() as tx:
        tx.session.add(WebhookRow(id="w", url="https://h.test/", events=["FAILED"], secret="s", created_at=at))
        await tx.session.flush()
        tx.session.add(WebhookDeliveryRow(id="d", webhook_id="w", type="test", body="{}", created_at=at))
    await downgrade(database, "0014")
    assert {"webhooks", "webhook_deliveries"}.isdisjoint(await tables(database))
    await upgrade(database)
    async with database.read() as session:
        assert (await session.execute(select(WebhookRow))).all() == []
    await upgrade(database)


async def test_migrations_make_what_the_rows_say(database: Database) -> None:
    await upgrade(database)

    def compare(connection: Connection) -> list[Any]:
        found: list[Any] = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata
        )
        return found

    async with database.engine.connect() as connection:
        assert await connection.run_sync(compare) == []


async def test_a_newest_database_loads_no_migrations(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await upgrade(database, "0011")
    with monkeypatch.context() as without_alembic:
        without_alembic.setitem(sys.modules, "alembic", None)
        with pytest.raises(ImportError):
            await upgrade(database)
    await upgrade(database)
    monkeypatch.setitem(sys.modules, "alembic", None)
    await upgrade(database)


async def test_newest_revision_is_that_of_alembic() -> None:
    assert newest_revision() == ScriptDirectory(str(script_location())).get_current_head()


async def test_a_database_of_a_newer_server_is_refused(database: Database) -> None:
    await upgrade(database)
    async with database.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Unavailable, match="of a newer Penstock: it has the revision 9999"):
        await upgrade(database)


async def test_two_servers_that_start_at_once_migrate_once(database_url: str) -> None:
    both = [Database(database_url), Database(database_url)]
    try:
        await asyncio.gather(*(upgrade(one) for one in both))
        assert await tables(both[0]) == set(Base.metadata.tables)
    finally:
        for one in both:
            await one.close()


async def test_a_new_sqlite_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    # The switch to a write-ahead log does not wait for another connection by itself: one time in ten it failed.
    for number in range(8):
        several = [Database(f"sqlite+aiosqlite:///{tmp_path}/{number}.db") for _ in range(3)]
        try:
            await asyncio.gather(*(upgrade(one) for one in several))
        finally:
            for one in several:
                await one.close()


async def test_second_server_on_one_database_is_refused(database_url: str, tmp_path: Path) -> None:
    # On SQLite it is the state folder that is shared; on PostgreSQL the database, from another folder.
    other = tmp_path if database_url.startswith("sqlite") else tmp_path / "other"
    second = open_runtime(settings_for(other, database_url))
    async with open_runtime(settings_for(tmp_path, database_url)):
        with pytest.raises(Unavailable, match="in use by another server"):
            await second.__aenter__()


async def test_sqlite_is_opened_with_the_pragmas_that_we_rely_on(database: Database) -> None:
    if not database.is_sqlite:
        assert database.engine.dialect.name == "postgresql"
        return
    async with database.engine.connect() as connection:
        for pragma, wanted in (("journal_mode", "wal"), ("foreign_keys", 1), ("busy_timeout", 30_000)):
            assert (await connection.execute(text(f"PRAGMA {pragma}"))).scalar_one() == wanted


async def test_no_migration_folder_is_a_package() -> None:
    assert not list(script_location().rglob("__init__.py"))
