"""Two servers on one PostgreSQL: whatever happens to the connection that holds the lock, one of them writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from tests.server.harness import Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.errors import Unavailable
from penstock_server import runtime as runtimes
from penstock_server.runtime import open_runtime

pytestmark = pytest.mark.asyncio


async def lose_the_lock(server: Server) -> None:
    """End the connection that holds the lock, as a restart of PostgreSQL or of a firewall does."""
    async with server.runtime.database.write() as tx:
        statement = (
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        )
        statement += " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        assert (await tx.session.execute(text(statement))).scalars().all() == [True]


async def test_a_server_without_its_lock_writes_nothing_beside_another(
    postgres_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "KEEP_EVERY_S", 3600.0)  # it notices by its writes alone
    async with running(settings_for(tmp_path / "one", postgres_database)) as first:
        job = await first.submit(name="before")
        await lose_the_lock(first)
        async with running(settings_for(tmp_path / "two", postgres_database)) as second:
            refused = await first.http.post("/api/v1/jobs", json={"spec": {"name": "late", "entrypoint": ["true"]}})
            assert (refused.status_code, refused.json()["code"]) == (503, "taken_over")
            assert first.runtime.database.taken_over.is_set()
            assert (await second.job(job["id"]))["name"] == "before"
            await second.submit(name="after")
            names = [one["name"] for one in (await second.http.get("/api/v1/jobs")).json()["items"]]
            assert sorted(names) == ["after", "before"]


async def test_a_lost_lock_is_taken_again(
    postgres_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "KEEP_EVERY_S", 0.02)
    async with running(settings_for(tmp_path / "one", postgres_database)) as first:
        holder = first.runtime.database._holder
        await lose_the_lock(first)

        async def is_taken_again() -> bool:
            return first.runtime.database._holder is not holder

        await until_answer(is_taken_again, bool)
        with pytest.raises(Unavailable, match="in use by another server"):
            async with open_runtime(settings_for(tmp_path / "two", postgres_database)):
                pass
        await first.submit(name="goes-on")
