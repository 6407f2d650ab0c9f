"""What an agent finds of its machine is shown with its node, and replaced when it connects again; so is a full disk."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio
SMALL = {"name": "shared memory", "level": "warning", "detail": "/dev/shm has 64 MiB", "advice": "--shm-size=1g"}


async def shown(server: Server) -> list[dict[str, Any]]:
    (node,) = (await server.http.get("/api/v1/nodes")).json()["items"]
    found: list[dict[str, Any]] = node["findings"]
    return found


async def test_findings_are_shown_with_the_node(server: Server) -> None:
    node = await server.join()
    async with server.agent(node, findings=[SMALL]):
        assert await shown(server) == [SMALL]


async def test_findings_stay_when_the_agent_is_away(server: Server) -> None:
    node = await server.join()
    async with server.agent(node, findings=[SMALL]):
        pass
    assert await shown(server) == [SMALL]


async def test_findings_are_replaced_by_the_next_connection(server: Server) -> None:
    node = await server.join()
    async with server.agent(node, findings=[SMALL]):
        pass
    async with server.agent(node, findings=[]):
        assert await shown(server) == []


async def test_an_agent_that_sends_none_has_none(server: Server) -> None:
    node = await server.join()
    async with server.agent(node):
        assert await shown(server) == []


def beat(free_bytes: int) -> dict[str, Any]:
    return {"type": "beat", "disk": {"free_bytes": free_bytes, "total_bytes": 1 << 30}}


async def test_a_node_whose_disk_is_full_says_so_and_takes_no_job(server: Server) -> None:
    node = await server.join()
    async with server.agent(node) as agent, server.browser() as browser:
        await browser.subscribe(1, topic="jobs")
        await agent.send(**beat((16 << 20) - 1))
        [pushed, *_] = await browser.of("nodes", lambda m: bool(m["nodes"][0]["findings"]))
        [found] = pushed["nodes"][0]["findings"]
        assert (found["name"], found["level"]) == ("disk", "error")
        assert "is full: 16.8 MB of 1,074 MB are free" in found["detail"]
        assert await shown(server) == [found]
        job = await server.submit()
        await until_answer(lambda: server.job(job["id"]), lambda job: "disk of node" in job["why"])
        spec = {"name": "x", "entrypoint": ["true"]}
        plan = (await server.http.post("/api/v1/jobs:plan", json={"spec": spec})).json()
        assert (plan["would_start"], plan["nodes"][0]["reason"]) == (False, "its disk is full")
        await agent.send(**beat(16 << 20))
        await agent.desired(1)
        assert await shown(server) == []
