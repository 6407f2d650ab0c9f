"""Many jobs that have ended cost nothing while the server idles, places and lists: every read of them is by index."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, text
from tests.server.harness import Server

pytestmark = pytest.mark.asyncio

LONG = ("jobs", "replicas", "events", "attempts", "metrics")
"""Tables that grow with every job."""
COUNTED = "count(*) AS count_1 \nFROM jobs"
"""The number of all jobs, which a dashboard shows. It reads an index and no rows."""


def statements_of(server: Server) -> list[tuple[str, Any]]:
    """Every statement that reads, from now on, with its parameters."""
    found: list[tuple[str, Any]] = []

    def on_statement(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if statement.split()[0] in ("SELECT", "UPDATE", "DELETE"):
            found.append((statement, parameters))

    event.listen(server.runtime.database.engine.sync_engine, "before_cursor_execute", on_statement)
    return found


async def scans(server: Server, statements: list[tuple[str, Any]]) -> list[str]:
    """Return the plans of those statements that read a long table from end to end, one for each."""
    found = []
    async with server.runtime.database.engine.connect() as connection:
        for statement, parameters in dict(statements).items():
            if COUNTED in statement:
                continue
            plan = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            for *_, step in plan.all():
                words = step.split()
                if words[0] == "SCAN" and words[1].strip("+") in LONG and "USING" not in words:
                    found.append(f"{step}: {statement}")
    return found


async def settle(server: Server) -> None:
    """Have every pipeline take a step."""
    await server.runtime.leases.step()
    await server.runtime.reports.overdue()
    await server.runtime.attach.step()
    await server.runtime.scheduling.run()
    await server.runtime.publisher.step()


async def test_flaw_13_idle_steps_read_no_long_table_whole(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    async with sqlite_server.agent(node) as agent:
        first = await sqlite_server.submit(trainers={"count": 4})
        await agent.desired(4)
        await sqlite_server.submit(trainers={"count": 4}, name="behind")
        statements = statements_of(sqlite_server)
        await settle(sqlite_server)
        await sqlite_server.http.post(f"/api/v1/jobs/{first['id']}:cancel")
        await settle(sqlite_server)
        assert len({statement for statement, _ in statements}) > 10
        assert await scans(sqlite_server, list(statements)) == []


async def test_lists_and_filters_read_no_long_table_whole(sqlite_server: Server) -> None:
    for number in range(3):
        await sqlite_server.submit(name=f"job-{number}")
    statements = statements_of(sqlite_server)
    page = (await sqlite_server.http.get("/api/v1/jobs", params={"page_size": 1})).json()
    asked = [
        {"page_token": page["next_page_token"]},
        {"state": "QUEUED"},
        {"name": "job-1"},
        {"state": "QUEUED", "name": "job-1", "page_token": page["next_page_token"]},
        {"search": "job"},
        {"order": "attention"},
        {"order": "attention", "page_token": page["next_page_token"]},
        {"state": "QUEUED,RUNNING", "order": "attention"},
    ]
    for params in asked:
        assert (await sqlite_server.http.get("/api/v1/jobs", params=params)).status_code == 200
    assert (await sqlite_server.http.get("/api/v1/job-counts")).status_code == 200
    async with sqlite_server.browser() as browser:
        await browser.subscribe(1, topic="jobs")
    await sqlite_server.http.get("/metrics")
    assert await scans(sqlite_server, list(statements)) == []


async def test_search_finds_names_by_their_beginning(server: Server) -> None:
    for name in ("ctr", "ctr-2", "ctr.wide", "mnist", "ctx"):
        await server.submit(name=name)

    async def names(**params: Any) -> list[str]:
        answer = await server.http.get("/api/v1/jobs", params=params)
        return [job["name"] for job in answer.json()["items"]]

    assert await names(search="ctr") == ["ctr.wide", "ctr-2", "ctr"]
    assert await names(search="ctr-") == ["ctr-2"]
    assert await names(search="ctr", state="RUNNING") == []
    first = (await server.http.get("/api/v1/jobs", params={"search": "ctr", "page_size": 2})).json()
    assert await names(search="ctr", page_token=first["next_page_token"]) == ["ctr"]


async def test_plans_would_show_a_scan(sqlite_server: Server) -> None:
    statements = statements_of(sqlite_server)
    async with sqlite_server.runtime.database.read() as session:
        await session.execute(text("SELECT id FROM jobs WHERE why = ''"))
    assert len(await scans(sqlite_server, statements)) == 1
