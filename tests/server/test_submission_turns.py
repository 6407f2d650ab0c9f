"""A submission is one turn of SQLite's thread, and two statements of PostgreSQL, so that little of it waits in line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from tests.server.harness import Server, running, settings_for

from penstock.compat.aiosqlite import Connection
from penstock.protocol.jobspec import JobSpec
from penstock_server.db import Database
from penstock_server.services.jobs import fingerprint
from penstock_server.tables import AuditRow, EventRow, IdempotencyRow, JobRow

pytestmark = pytest.mark.asyncio

SPEC = {"name": "job", "entrypoint": ["true"]}


async def submit(server: Server, key: str) -> dict[str, Any]:
    answer = await server.http.post("/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": key})
    assert answer.status_code == 201, answer.text
    job: dict[str, Any] = answer.json()
    return job


async def counts(database: Database) -> list[int]:
    async with database.read() as session:
        tables = (JobRow, EventRow, IdempotencyRow, AuditRow)
        found = [(await session.execute(select(func.count()).select_from(table))).scalar_one() for table in tables]
    return [int(one) for one in found]


class Turns:
    """What the writer's connection executes while a submission holds the lock of writes."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._server = server
        run: Callable[..., Awaitable[Any]] = Connection._execute

        async def noted(connection: Connection, *arguments: Any, **named: Any) -> Any:
            if server.runtime.database.lock._is_held:
                self.seen.append(str(arguments[0]))
            return await run(connection, *arguments, **named)

        monkeypatch.setattr(Connection, "_execute", noted)


async def quiet(server: Server) -> None:
    """End what writes by itself: only requests are left."""
    names = set()
    for loop in server.runtime.loops:
        loop.stop()
        names.add(loop.name)
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() in names])


async def test_submission_takes_one_turn_of_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(settings_for(tmp_path)) as server:
        await submit(server, "before")
        await quiet(server)
        before = await counts(server.runtime.database)
        turns = Turns(server, monkeypatch)
        await submit(server, "new")
        assert len(turns.seen) == 1, turns.seen
        assert await counts(server.runtime.database) == [before[0] + 1, before[1] + 2, before[2] + 1, before[3] + 1]


async def test_submission_takes_two_statements_of_postgresql(tmp_path: Path, postgres_copy: str) -> None:
    async with running(settings_for(tmp_path, postgres_copy)) as server:
        await submit(server, "before")
        await quiet(server)
        before = await counts(server.runtime.database)
        statements: list[str] = []

        def on_execute(*arguments: Any) -> None:
            if arguments[0].get_execution_options().get("penstock_write"):
                statements.append(arguments[2])

        event.listen(server.runtime.database.engine.sync_engine, "before_cursor_execute", on_execute)
        await submit(server, "new")
        assert len(statements) == 2, statements
        assert await counts(server.runtime.database) == [before[0] + 1, before[1] + 2, before[2] + 1, before[3] + 1]


async def test_same_key_at_once_makes_one_job(migrated_url: str | None, tmp_path: Path) -> None:
    async with running(settings_for(tmp_path, migrated_url)) as server:
        jobs = await asyncio.gather(*(submit(server, "same") for _ in range(8)))
        assert len({job["id"] for job in jobs}) == 1
        assert (await counts(server.runtime.database))[0] == 1


async def test_key_of_the_version_before_is_still_the_same() -> None:
    """The sum is of commit 7fe31e2c, which had no `node_selector`."""
    spec = {"name": "n", "mode": "collective", "entrypoint": ["true"], "trainers": {"count": 2, "cpus": 1}}
    known = "c7158b830b02a357f541b472bb9b7695638f42058e52bc771956e8764a0d352e"
    assert fingerprint(JobSpec.model_validate(spec)) == known
    assert fingerprint(JobSpec.model_validate({**spec, "node_selector": {"gpu": "a100"}})) != known
