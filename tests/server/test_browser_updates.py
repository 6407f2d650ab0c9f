"""What many browsers are sent of changes that come thick and fast."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer, until_async

from penstock_server.pipelines import Loop

pytestmark = pytest.mark.asyncio


async def test_nodes_go_to_browsers_once_a_second_at_most(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    async with sqlite_server.agent(node), sqlite_server.browser() as browser:
        await browser.subscribe(1, topic="jobs")
        begin = time.monotonic()
        for verb in ("cordon", "uncordon") * 15:
            await sqlite_server.http.post(f"/api/v1/nodes/{node[0]}:{verb}")
        await sqlite_server.http.post(f"/api/v1/nodes/{node[0]}:cordon")

        async def sent() -> list[str]:
            return [m["nodes"][0]["state"] for m in browser.messages if m["type"] == "nodes"]

        found = await until_answer(sent, lambda states: states[-1:] == ["CORDONED"])
        assert len(found) <= time.monotonic() - begin + 2, "30 changes in one list or two"


async def test_a_loop_that_rests_ends_at_once() -> None:
    steps = 0

    async def step() -> None:
        nonlocal steps
        steps += 1
        loop.wake()

    loop = Loop("test", step, every_s=60, rest_s=60)
    running = asyncio.create_task(loop.run())
    await until_async(lambda: steps == 1)
    loop.stop()
    async with asyncio.timeout(5):
        await running
    assert steps == 1
