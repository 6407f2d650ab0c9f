"""A database that is unreachable or full, with real ones: what runs goes on, and what is asked gets a clear answer."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError
from tests.server.harness import FakeAgent, FakeClock, Server, running, settings_for
from tests.server.postgres_cluster import Cluster
from tests.support.waiting import LIMIT_S, until_answer

from penstock.protocol.frames import Kind
from penstock_server.db import DatabaseAway, StorageFull, _away_as_such
from penstock_server.services import orders
from penstock_server.services.leases import UNWATCHED_S, Leases, Standing

pytestmark = pytest.mark.asyncio


async def leases(agent: FakeAgent) -> list[dict[str, Any]]:
    return [m for m in agent.messages if m["type"] == "lease"]


def has(number: int) -> Callable[[list[dict[str, Any]]], bool]:
    """Whether there are so many answers."""
    return lambda found: len(found) == number


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open SQLite files that may not grow beyond 120 pages: the code and text of its error are those of a full disk."""
    from penstock_server import db

    def limited(connection: Any, record: Any) -> None:
        original(connection, record)
        cursor = connection.cursor()
        cursor.execute("PRAGMA max_page_count = 120")
        cursor.close()

    original = db._on_sqlite_connect
    monkeypatch.setattr(db, "_on_sqlite_connect", limited)


async def until_full(server: Server) -> None:
    """Submit jobs until there is no room for one more."""
    for number in range(200):
        body = {"spec": {"name": f"job-{number}", "entrypoint": ["x" * 4000]}}
        answer = await server.http.post("/api/v1/jobs", json=body)
        if answer.status_code != 201:
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_full"), answer.text
            assert "the server's disk is full" in answer.json()["detail"]
            assert answer.headers["Retry-After"] == "5"
            return
    raise AssertionError("the disk never became full")


async def test_a_full_disk_is_an_answer_and_costs_no_node(
    full_disk: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(settings_for(tmp_path)) as server:
        job = await server.submit(name="runs")
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
            await until_full(server)
            ready = await server.http.get("/readyz")
            assert (ready.status_code, ready.json()["code"]) == (503, "storage_full")
            for step in range(200):
                await agent.frame(replica, Kind.SCALARS, seq=step, body=point(step))
            await agent.send(type="beat")
            [answer] = await until_answer(lambda: leases(agent), bool)
            assert answer["stored"] is False
            assert (await server.job(job["id"]))["state"] == "RUNNING"
    assert "Traceback" not in capfd.readouterr().err


async def test_a_quota_of_postgresql_is_a_full_disk() -> None:
    said = f'could not extend file "base/1/2": {os.strerror(errno.EDQUOT)}'
    with pytest.raises(StorageFull, match=re.escape(said)), _away_as_such():
        raise DBAPIError("INSERT", {}, Exception(said))


async def test_a_file_of_sqlite_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    """As under a quota: to SQLite one is an error of writing, as RLIMIT_FSIZE is."""
    code = """
import resource, sqlite3, sys
from sqlalchemy.exc import OperationalError
from penstock_server.db import StorageFull, _away_as_such
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
connection = sqlite3.connect(sys.argv[1])
try:
    with _away_as_such():
        try:
            connection.execute("CREATE TABLE t (c)")
            connection.execute("INSERT INTO t VALUES (zeroblob(1000000))")
            connection.commit()
        except sqlite3.OperationalError as error:
            raise OperationalError("INSERT", {}, error) from error
except StorageFull as error:
    print(error)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, tmp_path / "db", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, errors = await process.communicate()
    assert b"the server's disk is full, or a quota is used up, or it fails: disk I/O error" in said, errors


async def conditions(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await server.http.get("/api/v1/conditions")).json()["items"]
    return found


async def test_a_full_disk_is_a_condition_that_browsers_get(full_disk: None, tmp_path: Path) -> None:
    async with running(settings_for(tmp_path)) as server, server.browser() as browser:
        await browser.ws.send(json.dumps({"type": "subscribe", "id": 1, "topic": "server"}))
        assert [m["conditions"] for m in await browser.of("conditions")] == [[]]
        assert await conditions(server) == []
        await until_full(server)
        [first, *_] = await browser.of("conditions", lambda m: bool(m["conditions"]))
        [found] = first["conditions"]
        assert (found["code"], found["detail"]) == ("storage_full", "database or disk is full")
        assert await conditions(server) == [found]


async def test_a_database_that_is_away_is_a_condition_till_it_is_back(tmp_path: Path, postgres_apart: Cluster) -> None:
    """Meanwhile a browser gets no list, but its connection stays."""
    async with running(settings_for(tmp_path, postgres_apart.url)) as server, server.browser() as browser:
        await browser.ws.send(json.dumps({"type": "subscribe", "id": 1, "topic": "server"}))
        postgres_apart.stop("immediate")
        began = datetime.now(UTC)
        [first, *_] = await browser.of("conditions", lambda m: bool(m["conditions"]))
        [found] = first["conditions"]
        assert found["code"] == "database_away"
        assert abs((datetime.fromisoformat(found["since"]) - began).total_seconds()) < LIMIT_S
        assert await conditions(server) == [found], "one begin, however often it is looked at"
        await browser.ws.send(json.dumps({"type": "subscribe", "id": 2, "topic": "jobs"}))
        [failed] = await browser.of("unavailable")
        assert failed["id"] == 2
        postgres_apart.start()
        await until_answer(lambda: conditions(server), lambda found: found == [])
        assert [m["conditions"] for m in await browser.of("conditions")][-1] == []
        assert (await browser.subscribe(2, topic="jobs"))["jobs"] == []


def point(step: int) -> dict[str, Any]:
    return {"step": step, "time_ns": step + 1, "values": {f"series-{i}-{'x' * 60}": 0.5 for i in range(20)}}


async def test_without_the_database_for_long_no_job_ends(
    tmp_path: Path, postgres_apart: Cluster, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, postgres_apart.url), clock) as server:
        job = await server.submit()
        node = await server.join()
        async with server.agent(node) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
            await agent.frame(replica, Kind.SCALARS, body=point(0))
            await agent.send(type="beat")
            await until_answer(lambda: leases(agent), bool)
            postgres_apart.stop()
            answer = await server.http.get("/api/v1/jobs")
            assert (answer.status_code, answer.json()["code"]) == (503, "database_away")
            for step in range(1, 7):  # twice the lease and its grace
                await agent.frame(replica, Kind.SCALARS, seq=step, body=point(step))
                clock.advance(25)
                await agent.send(type="beat")
                await until_answer(lambda: leases(agent), has(step + 1))
            assert [m["stored"] for m in await leases(agent)][-1] is False
            postgres_apart.start()

            async def ready() -> int:
                await agent.send(type="beat")
                return (await server.http.get("/readyz")).status_code

            await until_answer(ready, lambda code: code == 200)
            assert (await server.job(job["id"]))["state"] == "RUNNING"
            await agent.report(replica, "EXITED", exit_code=0)
            await server.job_in(job["id"], "SUCCEEDED")
            steps = (await server.http.get(f"/api/v1/jobs/{job['id']}/metrics")).json()["series"]
            assert {tuple(found["step"]) for found in steps.values()} == {(0, 1, 2, 3, 4, 5, 6)}


async def test_leases_that_nobody_could_look_at_get_a_fresh_grace() -> None:
    held = Leases(ttl_s=15, grace_s=60)
    held.look(0, uptime=0)
    held.renew("node", 0)
    held.look(100, uptime=UNWATCHED_S)
    assert held.standing("node", 100) is Standing.GONE
    held.renew("other", 100)
    held.look(300, uptime=2 * UNWATCHED_S + 1)
    assert held.standing("node", 300) is Standing.ALIVE
    assert held.standing("other", 300 + 74) is Standing.ALIVE
    assert held.standing("other", 300 + 76) is Standing.MISSED


async def test_a_process_by_hand_learns_that_nothing_is_stored(full_disk: None, tmp_path: Path) -> None:
    async with running(settings_for(tmp_path)) as server, server.attached() as trainer:
        await until_full(server)
        for step in range(100):
            await trainer.frame(Kind.SCALARS, body=point(step))
        await trainer.ws.send(json.dumps({"type": "beat"}))
        assert json.loads(await trainer.ws.recv()) == {"type": "beat", "stored_seq": -1}


async def test_orders_are_sent_once_the_database_is_back(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher has taken note of a placement when the database is away for a moment."""
    real, asked = orders.desired, []

    async def away_at_first(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if len(asked) == 1:
            raise DatabaseAway("the connection was lost")
        return await real(*args, **kwargs)

    node = await sqlite_server.join()
    async with sqlite_server.agent(node) as agent:
        monkeypatch.setattr("penstock_server.pipelines.desired", away_at_first)
        await sqlite_server.submit()
        assert len(await agent.desired(1)) == 1
    assert len(asked) >= 2, "the agent got its orders by a question after the one that failed"


async def test_an_answered_submission_outlives_its_database(postgres_apart: Cluster, tmp_path: Path) -> None:
    """Clusters of tests have `synchronous_commit` off: one that ends at once would lose the last half second."""
    async with running(settings_for(tmp_path, postgres_apart.url)) as server:

        async def is_ready() -> int:
            return (await server.http.get("/readyz")).status_code

        for _ in range(3):
            answered = {(await server.submit())["id"] for _ in range(3)}
            postgres_apart.stop("immediate")
            postgres_apart.start()
            await until_answer(is_ready, lambda status: status == 200)
            listed = (await server.http.get("/api/v1/jobs?page_size=100")).json()["items"]
            assert answered <= {job["id"] for job in listed}
