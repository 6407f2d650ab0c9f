"""Nodes whose agents are late or gone: they come back without a new connection, and get no jobs meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import LIMIT_S, until_answer

pytestmark = pytest.mark.asyncio


async def node_state(server: Server, name: str) -> str:
    items: list[dict[str, Any]] = (await server.http.get("/api/v1/nodes")).json()["items"]
    state: str = next(node["state"] for node in items if node["name"] == name)
    return state


async def in_state(server: Server, name: str, state: str) -> None:
    await until_answer(lambda: node_state(server, name), lambda found: found == state)


async def test_one_late_heartbeat_does_not_leave_a_node_away(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        job = await server.submit()
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
            clock.advance(17)
            await in_state(server, "n1", "UNREACHABLE")
            await until_answer(lambda: server.job(job["id"]), lambda j: j["replicas"][0]["state"] == "UNKNOWN")
            await agent.send(type="beat")
            await in_state(server, "n1", "READY")
            back = await until_answer(lambda: server.job(job["id"]), lambda j: j["replicas"][0]["state"] == "RUNNING")
            assert back["why"] == "runs 1 trainer on node 'n1'"
            clock.advance(10)
            second = await server.submit(name="second")
            await server.job_in(second["id"], "STARTING")
            await agent.desired(2)


async def test_heartbeat_during_a_look_at_leases_brings_the_node_back(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        async with server.agent(node):
            overdue, was_unreachable = server.runtime.reports.overdue, asyncio.Event()

            async def heartbeat_meanwhile() -> None:
                await overdue()
                if await node_state(server, "n1") == "UNREACHABLE":
                    monkeypatch.undo()
                    server.runtime.leases.renew(node[0])
                    was_unreachable.set()  # until the next look only, which may be before the test can ask

            monkeypatch.setattr(server.runtime.reports, "overdue", heartbeat_meanwhile)
            clock.advance(17)
            async with asyncio.timeout(LIMIT_S):
                await was_unreachable.wait()
            await in_state(server, "n1", "READY")


async def test_any_message_of_an_agent_extends_its_lease(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        await server.submit()
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            for turn in range(4):
                clock.advance(10)
                await agent.log(replica, 2 * turn, b"x\n")
            assert await node_state(server, "n1") == "READY"


async def test_a_cordoned_node_is_cordoned_after_a_late_heartbeat(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            await server.http.post(f"/api/v1/nodes/{node[0]}:cordon")
            clock.advance(17)
            await in_state(server, "n1", "UNREACHABLE")
            await agent.send(type="beat")
            await in_state(server, "n1", "CORDONED")


async def test_no_job_goes_to_a_node_whose_agent_is_gone(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        async with server.agent(await server.join("a-gone")):
            pass
        waiting = await server.submit()
        told = await until_answer(lambda: server.job(waiting["id"]), lambda j: "not connected" in j["why"])
        assert told["why"] == "waits for a node: the agent of node 'a-gone' is not connected"
        assert await node_state(server, "a-gone") == "READY"  # within its lease
        async with server.agent(await server.join("b-here")) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(waiting["id"], "RUNNING")


async def test_what_never_started_is_placed_again_for_free(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        job = await server.submit(restart={"max_restarts": 0})
        async with server.agent(await server.join("a-gone")) as agent:
            [old] = await agent.desired(1)  # and it says nothing of it
        clock.advance(16)
        waiting = await server.job_in(job["id"], "RECOVERING")
        assert "node 'a-gone' was gone before it had taken it" in waiting["reason_detail"]
        async with server.agent(await server.join("b-here")) as agent:
            [new] = await agent.desired(1)
            assert (new["attempt"], new["epoch"]) == (2, old["epoch"] + 1)
            await agent.start(new)
            await agent.report(new, "EXITED", exit_code=0)
            done = await server.job_in(job["id"], "SUCCEEDED")
        assert done["restarts_left"] == 0


async def test_a_lost_node_is_no_end_of_a_job_that_says_nothing(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        job = await server.submit()
        async with server.agent(await server.join("old")) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
        clock.advance(16)
        await in_state(server, "old", "UNREACHABLE")
        clock.advance(61)
        recovering = await server.job_in(job["id"], "RECOVERING")
        assert "restart 1 of 3 follows" in recovering["reason_detail"]
