"""What an agent finds of its machine is shown with its node, and replaced when it connects again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.harness import Server

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
