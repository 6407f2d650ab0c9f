"""What agents of jobs with parameter servers are told, read from the database and by an agent that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event, select
from tests.server.harness import FakeAgent, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock_server.services.orders import desired
from penstock_server.tables import AttemptRow

pytestmark = pytest.mark.asyncio

SMALL = {"cpus": 0, "memory": "1MiB"}


async def submitted(server: Server, name: str, **spec: Any) -> dict[str, Any]:
    given = {"trainers": {"count": 3, **SMALL}, "pservers": {"count": 1, **SMALL}, **spec}
    return await server.submit(name=name, mode="pserver", **given)


async def orders_of(server: Server, node_id: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The orders of a node, and the statements that they took: the publisher, a task of its own, reads such too."""
    statements: list[str] = []
    mine = asyncio.current_task()

    def on_statement(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "job_id IN (" in statement and asyncio.current_task() is mine:
            statements.append(statement)

    engine = server.runtime.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", on_statement)
    told = await desired(server.runtime.database, node_id, without=(), released=(), now=datetime.now(UTC))
    event.remove(engine, "before_cursor_execute", on_statement)
    return told.message.fields()["replicas"], statements


async def test_orders_of_a_node_cost_the_same_for_many_jobs(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    async with sqlite_server.agent(node):
        first = await submitted(sqlite_server, "first")
        await sqlite_server.job_in(first["id"], "STARTING")
        _, few = await orders_of(sqlite_server, node[0])
        others = [await submitted(sqlite_server, f"other{i}") for i in range(2)]
        for job in others:
            await sqlite_server.job_in(job["id"], "STARTING")
        orders, many = await orders_of(sqlite_server, node[0])
    assert len(many) == len(few) > 0
    told = {(one["job_id"], one["pserver_job"]["token"], *one["pserver_job"]["endpoints"]) for one in orders}
    assert len(orders) == 12
    assert len(told) == len({token for _, token, *_ in told}) == len({endpoint for *_, endpoint in told}) == 3
    assert {one["pserver_job"]["num_trainers"] for one in orders} == {3}


@pytest_asyncio.fixture
async def patient_server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server that misses no agent, though those of these tests do not beat: it would tell them their orders again."""
    async with running(settings_for(tmp_path, lease_ttl_s=600)) as server:
        yield server


async def test_node_of_an_earlier_attempt_learns_that_its_job_is_over(patient_server: Server) -> None:
    """What a pserver wrote there is kept until then, and removed by the agent when it is told."""
    first, second = await patient_server.join("n1"), await patient_server.join("n2")
    async with patient_server.agent(first) as one, patient_server.agent(second) as other:
        await patient_server.http.post(f"/api/v1/nodes/{second[0]}:cordon")
        job = await submitted(patient_server, "moves", trainers={"count": 1, **SMALL}, restart={"max_restarts": 1})
        orders = await one.desired(2)
        await patient_server.http.post(f"/api/v1/nodes/{second[0]}:uncordon")
        await patient_server.http.post(f"/api/v1/nodes/{first[0]}:cordon")
        for order in orders:
            await one.report(order, "EXITED", exit_code=125, detail="could not be prepared: the disk is full")
        orders = await other.desired(2)
        assert await kept_at(one) == [job["id"]]
        for order in orders:
            await other.start(order)
            await other.report(order, "EXITED", exit_code=0)
        await patient_server.job_in(job["id"], "SUCCEEDED")
        await until_answer(lambda: kept_at(one), lambda kept: kept == [])


async def test_secrets_of_attempts_that_are_over_are_kept_nowhere(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    async with sqlite_server.agent(node) as agent:
        job = await submitted(sqlite_server, "over")
        orders = await agent.desired(4)
        async with sqlite_server.runtime.database.read() as session:
            running = (await session.execute(select(AttemptRow.secret))).scalars().all()
        for order in orders:
            await agent.start(order)
            await agent.report(order, "EXITED", exit_code=0)
        await sqlite_server.job_in(job["id"], "SUCCEEDED")
        async with sqlite_server.runtime.database.read() as session:
            over = (await session.execute(select(AttemptRow.secret))).scalars().all()
    assert running == [orders[0]["pserver_job"]["token"]]
    assert over == [""]


async def kept_at(agent: FakeAgent) -> list[str]:
    """Jobs whose pservers' state the agent was last told to keep."""
    found: list[list[str]] = [one["keep_state"] for one in agent.messages if one["type"] == "desired"]
    return found[-1]
