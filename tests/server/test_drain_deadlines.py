"""A drain with a deadline: what still runs then is preempted, placed elsewhere, and the node is drained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import select
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock_server.tables import EventRow

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Server, FakeClock]]:
    clock = FakeClock()
    async with running(settings_for(tmp_path, lease_ttl_s=1e7), clock) as server:
        yield server, clock


async def want(server: Server, node_id: str, what: str, **body: Any) -> dict[str, Any]:
    answer: httpx.Response = await server.http.post(f"/api/v1/nodes/{node_id}:{what}", json=body or None)
    assert answer.status_code == 202, answer.text
    node: dict[str, Any] = answer.json()
    return node


async def node_in(server: Server, node_id: str, state: str) -> dict[str, Any]:
    async def node() -> dict[str, Any]:
        found: dict[str, Any] = (await server.http.get(f"/api/v1/nodes/{node_id}")).json()
        return found

    return await until_answer(node, lambda found: found["state"] == state)


async def events_of(server: Server, subject: str) -> list[EventRow]:
    async with server.runtime.database.read() as session:
        statement = select(EventRow).where(EventRow.subject == subject).order_by(EventRow.id)
        return list((await session.execute(statement)).scalars())


async def test_what_runs_at_the_deadline_is_placed_elsewhere(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    first, second = await server.join("n1"), await server.join("n2")
    async with server.agent(first) as old, server.agent(second) as new:
        await want(server, second[0], "cordon")
        job = await server.submit(restart={"max_restarts": 0})
        (replica,) = await old.desired(1)
        await old.start(replica)
        await server.job_in(job["id"], "RUNNING")
        await want(server, second[0], "uncordon")
        node = await want(server, first[0], "drain", deadline_s=60)
        assert (node["state"], node["reason"], node["drain_left_s"]) == ("DRAINING", "drain", 60.0)
        assert "2026-01-01 00:01:00 UTC" in node["reason_detail"]
        clock.advance(59.0)
        await server.runtime.drains.step()
        assert (await server.job(job["id"]))["state"] == "RUNNING", "the deadline is not over"
        clock.advance(1.0)
        assert await old.desired(0) == []
        waiting = await server.job_in(job["id"], "RECOVERING")
        assert (waiting["reason"], waiting["restarts"]) == ("preempted", 0)
        assert "node 'n1' is drained" in waiting["why"]
        assert await new.get_desired() == [], "not before the old attempt has ended"
        await old.report(replica, "KILLED", detail="stopped")
        (again,) = await new.desired(1)
        assert (again["job_id"], again["attempt"]) == (job["id"], 2)
        drained = await node_in(server, first[0], "DRAINED")
        assert (drained["reason"], drained["drain_by"], drained["drain_left_s"]) == ("drained", None, None)


async def test_drain_without_deadline_preempts_nothing(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    node = await server.join()
    async with server.agent(node) as agent:
        job = await server.submit()
        (replica,) = await agent.desired(1)
        await agent.start(replica)
        await server.job_in(job["id"], "RUNNING")
        assert (await want(server, node[0], "drain"))["drain_by"] is None
        clock.advance(1e6)
        await server.runtime.drains.step()
        assert (await server.job(job["id"]))["state"] == "RUNNING"


async def test_deadline_of_a_drain_can_be_changed_and_ended(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    node = await server.join()
    async with server.agent(node) as agent:
        job = await server.submit()
        (replica,) = await agent.desired(1)
        await agent.start(replica)
        await server.job_in(job["id"], "RUNNING")
        await want(server, node[0], "drain", deadline_s=10)
        longer = await want(server, node[0], "drain", deadline_s=100)
        assert longer["drain_left_s"] == 100.0
        clock.advance(50.0)
        await server.runtime.drains.step()
        assert (await server.job(job["id"]))["state"] == "RUNNING"
        ready = await want(server, node[0], "uncordon")
        assert (ready["state"], ready["drain_by"]) == ("READY", None)
        clock.advance(100.0)
        await server.runtime.drains.step()
        assert (await server.job(job["id"]))["state"] == "RUNNING"
    found = [(one.from_state, one.to_state, one.reason) for one in await events_of(server, node[0])]
    assert found[-3:] == [
        ("READY", "DRAINING", "drain"),
        ("DRAINING", "DRAINING", "drain"),
        ("DRAINING", "READY", "run"),
    ]


async def test_drain_preempts_a_job_on_all_of_its_nodes(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    first, second = await server.join("n1", cpus=1), await server.join("n2", cpus=1)
    async with server.agent(first) as one, server.agent(second) as other:
        job = await server.submit(trainers={"count": 2, "cpus": 1, "memory": "1MiB"})
        for agent in (one, other):
            await agent.start((await agent.desired(1))[0])
        await server.job_in(job["id"], "RUNNING")
        await want(server, first[0], "drain", deadline_s=0)
        assert await one.desired(0) == await other.desired(0) == []
        assert (await server.job(job["id"]))["state"] == "RECOVERING"


async def test_budget_of_preemptions_counts_drains(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    node = await server.join()
    async with server.agent(node) as agent:
        job = await server.submit(restart={"budgets": {"preempted": {"max_restarts": 0}}})
        (replica,) = await agent.desired(1)
        await agent.start(replica)
        await server.job_in(job["id"], "RUNNING")
        await want(server, node[0], "drain", deadline_s=0)
        await agent.desired(0)
        await agent.report(replica, "KILLED", detail="stopped")
        assert (await server.job_in(job["id"], "FAILED"))["reason"] == "preempted"


async def test_drain_goes_on_when_its_node_is_back(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(settings_for(tmp_path, lease_ttl_s=10, grace_s=60), clock) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            job = await server.submit()
            (replica,) = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
            clock.advance(11.0)
            await server.runtime.leases.step()
            silent = await node_in(server, node[0], "UNREACHABLE")
            assert "longer than its lease" in silent["reason_detail"]
            assert (await want(server, node[0], "drain", deadline_s=0))["state"] == "UNREACHABLE"
            await agent.send(type="beat")
            await server.job_in(job["id"], "RECOVERING")
