"""What many browsers are sent of changes that come thick and fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
from tests.server.harness import FakeBrowser, Server
from tests.server.test_telemetry_fanout import metrics
from tests.support.waiting import until_answer, until_async

from penstock.protocol.frames import Kind
from penstock_server.pipelines import Loop
from penstock_server.schemas import api
from penstock_server.services.jobs import Jobs
from penstock_server.streams import hub
from penstock_server.streams.queue import BrowserQueue, Encoded, encode

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


async def test_figures_of_a_running_job_are_sent_without_the_job(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as listing, sqlite_server.browser() as page:
        job_id = trainer.registered["job_id"]
        await listing.subscribe(1, topic="jobs")
        await page.subscribe(7, topic="job", job_id=job_id)
        for step in range(1, 4):
            await trainer.frame(Kind.METRICS, **metrics([step], [1.0 / step]))
        for browser, number in ((listing, 1), (page, 7)):
            [*_, last] = await browser.of("figures", lambda m: m["jobs"][job_id]["latest"].get("step") == 3)
            assert last["id"] == number
            assert (last["jobs"][job_id]["latest"]["loss"], last["jobs"][job_id]["progress"]) == (1.0 / 3, None)
            versions = [m["job"]["version"] for m in browser.messages if m["type"] == "job"]
            assert len(versions) == len(set(versions)), "figures change no version"


async def test_what_many_browsers_get_is_encoded_once(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []

    def noting(content: object) -> str:
        encoded.append(content)
        return encode(content)

    monkeypatch.setattr(hub, "encode", noting)
    async with AsyncExitStack() as stack:
        browsers = [await stack.enter_async_context(sqlite_server.browser()) for _ in range(10)]
        for browser in browsers:
            await browser.subscribe(1, topic="jobs")
        job = await sqlite_server.submit()
        for browser in browsers:
            [message, *_] = await browser.of("job", lambda m: m["job"]["id"] == job["id"])
            assert message["job"]["spec"] == job["spec"]
        versions = [one["version"] for one in encoded if isinstance(one, dict) and one.get("id") == job["id"]]
        assert len(versions) == len(set(versions)), "each state of the job once"


async def test_browsers_that_open_the_list_at_once_share_it(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, begun, reads = await sqlite_server.submit(), asyncio.Event(), 0
    go_on = asyncio.Event()
    of = Jobs.of

    async def slow(self: Jobs, ids: Sequence[str]) -> AsyncIterator[api.Job]:
        nonlocal reads
        reads += 1
        found = [one async for one in of(self, ids)]
        begun.set()
        await go_on.wait()
        for one in found:
            yield one

    monkeypatch.setattr(Jobs, "of", slow)
    async with AsyncExitStack() as stack:
        browsers = [await stack.enter_async_context(sqlite_server.browser()) for _ in range(10)]
        asking = [asyncio.create_task(browser.subscribe(1, topic="jobs")) for browser in browsers]
        await begun.wait()
        await sqlite_server.http.post(f"/api/v1/jobs/{job['id']}:cancel")  # the list that is being read lacks it
        await until_async(lambda: len(sqlite_server.runtime.hub._of_list) == 10)
        go_on.set()
        assert all(shot["total"] == 1 for shot in await asyncio.gather(*asking))
        for browser in browsers:

            async def seen(browser: FakeBrowser = browser) -> str:
                shown = [m["jobs"][0] if "jobs" in m else m["job"] for m in browser.messages if m["type"] != "nodes"]
                state: str = shown[-1]["state"]
                return state

            await until_answer(seen, lambda state: state == "CANCELLED")
        assert reads <= 3, "the first that asked; those that came meanwhile; those that came while these were served"


async def test_what_changes_while_a_snapshot_is_read_follows_it() -> None:
    queue = BrowserQueue(1000, 1000, 5.0, lambda: 0.0, lambda: None)
    subscription = hub.Subscription(3, None, frozenset({"state"}), queue)
    followers = hub.Hub()
    followers.add(subscription)
    followers.publish_listed({"id": "a", "state": "RUNNING", "spec": {"env": {}, "project": "default"}})
    followers.publish_nodes([])
    followers.publish_figures({"a": {"latest": {"loss": 1.0}, "progress": None, "eta_s": None}})
    assert queue.take() is None
    subscription.begin(Encoded(3, "the snapshot"))
    taken = queue.take()
    assert taken is not None
    texts = [message.text for message in taken.messages if isinstance(message, Encoded)]
    assert (texts[0], [text[:12] for text in texts[1:]]) == (
        "the snapshot",
        ['{"type":"job', '{"type":"nod', '{"type":"fig'],
    )
    followers.publish_listed({"id": "a", "state": "FAILED", "spec": {"env": {}, "project": "default"}})
    assert queue.take() is not None
