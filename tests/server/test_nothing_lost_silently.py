"""What a peer may forget, and what is reported to it as lost: acknowledged heartbeats, gaps, a browser's lag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.harness import Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.protocol.frames import Column, Header, Kind
from penstock_server.streams.hub import Hub, Subscription
from penstock_server.streams.queue import BrowserQueue, Encoded

pytestmark = pytest.mark.asyncio

SUMS = {name: np.array([1]) for name in (Column.OP, Column.COUNT, Column.TOTAL_NS, Column.MAX_NS)}


async def series(server: Server, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await server.http.get(f"/api/v1/jobs/{job_id}/metrics")).json()["series"]
    return found


def point(step: int) -> dict[str, Any]:
    return {"step": step, "time_ns": step, "values": {"auc": 0.5}}


async def test_heartbeat_is_answered_once_what_came_before_is_stored(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path, metrics_flush_s=600)) as server, server.attached() as trainer:
        beat = json.dumps({"type": "beat"})
        await trainer.ws.send(beat)
        assert json.loads(await trainer.ws.recv()) == {"type": "beat", "stored_seq": -1}
        for step in (1, 2):
            await trainer.frame(Kind.SCALARS, body=point(step))
        await trainer.ws.send(beat)
        assert json.loads(await trainer.ws.recv()) == {"type": "beat", "stored_seq": 1}
        assert (await series(server, trainer.registered["job_id"]))["auc"]["step"] == [1, 2]


async def test_lease_of_an_agent_says_that_its_frames_are_stored(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path, metrics_flush_s=600)) as server:
        job = await server.submit()
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await agent.frame(replica, Kind.SCALARS, body=point(1))
            await agent.send(type="beat")
            await until_answer(agent.count_leases, bool)
            assert (await series(server, job["id"]))["auc"]["step"] == [1]


async def test_missing_numbers_are_a_gap_unless_repeated_or_announced(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as browser:
        await browser.subscribe(1, topic="job", job_id=trainer.registered["job_id"])
        await trainer.frame(Kind.OP_SUMS, columns=SUMS)
        trainer.seq = 4
        await trainer.frame(Kind.OP_SUMS, columns=SUMS)
        assert [m["dropped"] for m in await browser.of("gap")] == [{"FRAMES": 3}]
        trainer.seq = 2
        await trainer.frame(Kind.PROGRESS, body={"done": 1, "total": 2})
        trainer.seq = 9
        await trainer.frame(Kind.GAP, body={"OP_EVENTS": 5})
        await trainer.frame(Kind.OP_SUMS, columns=SUMS)
        await browser.received(4)
        assert len(await browser.of("gap")) == 1


async def test_frames_lost_while_a_browser_subscribes_are_a_gap() -> None:
    hub, queue = Hub(), BrowserQueue(1000, 1000, 5.0, lambda: 0.0, lambda: None)
    subscription = Subscription(1, "job", frozenset({"ops"}), queue)
    hub.add(subscription)
    hub.publish_lost("job", 3)
    assert queue.take() is None
    hub.make_ready(subscription)
    taken = queue.take()
    assert taken is not None
    assert taken.messages == [{"type": "gap", "id": 1, "dropped": {"FRAMES": 3}}]


async def test_browser_that_caught_up_is_told_after_what_it_waited_for() -> None:
    now = [0.0]
    queue = BrowserQueue(10, 1000, 5.0, lambda: now[0], lambda: None)
    queue.put_frame(7, Kind.OP_SUMS, 1, b"x" * 20)
    now[0] = 2.0
    queue.put_frame(7, Kind.OP_SUMS, 1, b"y" * 20)
    taken = queue.take()
    assert taken is not None
    [degraded] = taken.messages
    assert not isinstance(degraded, Encoded) and degraded["type"] == "degraded" and degraded["reason"] is not None
    assert taken.stream == [b"x" * 20, b"y" * 20, {"type": "degraded", "id": 7, "reason": None}]
    queue.put_frame(7, Kind.OP_SUMS, 1, b"z")
    again = queue.take()
    assert again is not None
    assert again.stream == [b"z"]


async def test_of_steps_above_the_high_water_the_newest_waits() -> None:
    queue = BrowserQueue(10, 1000, 5.0, lambda: 0.0, lambda: None)
    for step in (b"1", b"2", b"3"):
        queue.put_frame(7, Kind.OP_EVENTS, 5, step * 20)
    taken = queue.take()
    assert taken is not None
    assert taken.stream == [b"3" * 20]
    assert taken.messages == [{"type": "gap", "id": 7, "dropped": {"OP_EVENTS": 10}}]


async def test_snapshot_of_the_list_says_how_many_jobs_there_are(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_server.services.listing.LISTED_JOBS", 1)
    for _ in range(3):
        job = await sqlite_server.submit()
        await sqlite_server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
        await sqlite_server.job_in(job["id"], "CANCELLED")
    async with sqlite_server.browser() as browser:
        snapshot = await browser.subscribe(1, topic="jobs")
        assert (len(snapshot["jobs"]), snapshot["total"], snapshot["more"]) == (1, 3, True)
    monkeypatch.setattr("penstock_server.services.listing.LISTED_JOBS", 3)
    async with sqlite_server.browser() as browser:
        snapshot = await browser.subscribe(1, topic="jobs")
        assert (len(snapshot["jobs"]), snapshot["total"], snapshot["more"]) == (3, 3, False)


async def test_a_page_that_opens_on_a_busy_job_has_lost_nothing(tmp_path: Path) -> None:
    settings, hub = settings_for(tmp_path), Hub()
    high_water, most = settings.browser_high_water_bytes, settings.browser_limit_bytes
    queue = BrowserQueue(high_water, most, settings.browser_slow_s, lambda: 0.0, lambda: None)
    for seq in range(1500):  # 1.5 MB, of which the newest are retained
        kind = Kind.EXCHANGE if seq % 500 == 0 else Kind.OP_EVENTS
        hub.publish_frame("j", Header(kind, 0, 4, seq % 2, 1, seq, 0, 1, 10, 952), bytes(1000))
    subscription = Subscription(1, "j", frozenset({"ops", "sync"}), queue)
    hub.add(subscription)
    assert hub.replay_recent(subscription)
    hub.make_ready(subscription)
    for seq in range(1500, 1600):
        hub.publish_frame("j", Header(Kind.OP_EVENTS, 0, 4, 0, 1, seq, 0, 1, 10, 952), bytes(1000))
    assert queue.dropped_rows == 0
