"""Telemetry from trainers to browsers: attached processes, figures, graphs, frames, logs, replay, slow browsers."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.graph_sample import sample_graph
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from penstock.protocol.frames import Column, Frame, Kind, decode_header, encode
from penstock.protocol.graphdoc import canonical, graph_hash

pytestmark = pytest.mark.asyncio


def metrics(steps: list[int], loss: list[float], samples: int = 1000, step_ns: int = 500_000_000) -> dict[str, Any]:
    n = len(steps)
    columns = {
        Column.STEP: steps,
        Column.TIME_NS: [1_700_000_000_000_000_000 + 800_000_000 * s for s in steps],
        Column.LOSS: loss,
        Column.SAMPLES: [samples] * n,
        Column.STEP_NS: [step_ns] * n,
        Column.SYNC_BYTES: [4096] * n,
        Column.SYNC_NS: [2_000_000] * n,
    }
    return {"columns": {name: np.array(values) for name, values in columns.items()}}


def events(rows: int, seed: int = 0) -> dict[str, Any]:
    names = (Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD)
    return {"columns": {name: np.arange(rows) + seed for name in names}}


def sums(total: int = 1) -> dict[str, Any]:
    return {"columns": {name: np.array([total]) for name in (Column.OP, Column.COUNT, Column.TOTAL_NS, Column.MAX_NS)}}


async def get(server: Server, path: str) -> Any:
    return (await server.http.get(f"/api/v1{path}")).json()


async def only_job(server: Server) -> dict[str, Any]:
    [job] = (await get(server, "/jobs"))["items"]
    found: dict[str, Any] = job
    return found


async def test_an_attached_trainer_and_pserver_share_a_job_in_the_api(server: Server) -> None:
    async with server.attached("My CTR run") as trainer, server.attached("My CTR run", "pserver", pid=8) as pserver:
        assert trainer.registered["type"] == "registered"
        assert trainer.registered["job_id"] == pserver.registered["job_id"]
        assert trainer.registered["stream"] != pserver.registered["stream"]
        job = await only_job(server)
        assert (job["kind"], job["state"], job["name"]) == ("attached", "RUNNING", "my-ctr-run")
        assert [(r["role"], r["index"]) for r in job["replicas"]] == [("trainer", 0), ("pserver", 0)]
        assert job["why"] == "runs 1 trainer and 1 pserver on host 'h'"
        [shown] = (await get(server, "/replicas?role=pserver"))["items"]
        assert (shown["endpoint"], shown["host"], shown["pid"]) == ("127.0.0.1:6174", "h", 8)
        assert (shown["state"], shown["node_id"], shown["epoch"]) == ("RUNNING", None, 1)
        await trainer.frame(Kind.GOODBYE, body={})
        await pserver.frame(Kind.GOODBYE, body={})
        done = await server.job_in(job["id"], "SUCCEEDED")
        assert done["reason"] == "detached"


async def test_role_and_index_of_a_connected_process_cannot_be_taken(sqlite_server: Server) -> None:
    async with sqlite_server.attached("a", pid=1) as first:
        token = await sqlite_server.token("attach")
        async with sqlite_server.connect("/api/v1/attach", token) as ws:
            register = {"type": "register", "job_name": "a", "role": "trainer", "index": 0, "host": "h", "pid": 2}
            await ws.send(json.dumps(register))
            with pytest.raises(ConnectionClosed) as closed:
                await ws.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4403
        assert "is process 1 on 'h'" in closed.value.rcvd.reason
    async with sqlite_server.attached("a", pid=1) as again:  # the same process, after a broken connection
        assert again.registered == first.registered


async def test_attached_process_that_falls_silent_is_lost(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        async with server.attached():
            job = await only_job(server)
        clock.advance(16)
        await until_answer(lambda: server.job(job["id"]), lambda j: j["replicas"][0]["state"] == "UNKNOWN")
        clock.advance(60)
        failed = await server.job_in(job["id"], "FAILED")
        assert "trainer 0 on host 'h' was lost" in failed["why"]


async def test_figures_reach_database_job_and_browser_once(server: Server) -> None:
    async with server.attached() as trainer, server.browser() as browser:
        job_id = trainer.registered["job_id"]
        await trainer.frame(Kind.METRICS, **metrics([1, 2], [0.5, float("nan")]))
        stored = await until_answer(
            lambda: get(server, f"/jobs/{job_id}/metrics"),
            lambda m: len(m["series"].get("step_ms", {"step": []})["step"]) == 2,
        )
        assert stored["series"]["loss"] == {"step": [1], "time_ns": [1_700_000_000_800_000_000], "value": [0.5]}
        # the second step ended 0.8 s after the first; it took 0.5 s, and 0.3 s lay between the two
        assert stored["series"]["samples_per_s"] == {
            "step": [2], "time_ns": [1_700_000_001_600_000_000], "value": [1250.0],
        }  # fmt: skip
        assert stored["series"]["sync_ms"]["value"] == [2.0, 2.0]
        snapshot = await browser.subscribe(1, topic="job", job_id=job_id)
        assert snapshot["metrics"] == stored["series"]
        assert snapshot["job"]["latest"]["loss"] == 0.5
        await trainer.frame(Kind.METRICS, **metrics([3], [0.25]))
        await trainer.frame(Kind.SCALARS, body={"step": 3, "time_ns": 5, "values": {"auc": 0.77, "bad": None}})
        await trainer.frame(Kind.PROGRESS, body={"done": 3, "total": 10, "unit": "step"})
        deltas = await browser.of("metrics", lambda m: "auc" in m["series"])
        assert deltas[-1]["series"]["auc"] == {"step": [3], "time_ns": [5], "value": [0.77]}
        steps = [
            s for m in browser.messages if m["type"] == "metrics" for s in m["series"].get("loss", {"step": []})["step"]
        ]
        assert steps == [3]
        [*_, seen] = await browser.of("figures", lambda m: m["jobs"][job_id]["progress"] is not None)
        assert seen["jobs"][job_id]["progress"] == {"done": 3.0, "total": 10.0, "unit": "step"}
        assert seen["jobs"][job_id]["latest"]["auc"] == 0.77
    picked = await get(server, f"/jobs/{job_id}/metrics?names=auc")
    assert list(picked["series"]) == ["auc"]


async def test_figures_of_other_replicas_are_series_of_their_own(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as first, sqlite_server.attached(index=1, pid=8) as second:
        await first.frame(Kind.METRICS, **metrics([1], [0.5]))
        await second.frame(Kind.METRICS, **metrics([1], [0.75]))
        path = f"/jobs/{first.registered['job_id']}/metrics"
        both = {"loss", "loss.trainer1"}  # over two connections: either may be stored first
        found = await until_answer(lambda: get(sqlite_server, path), lambda m: both <= m["series"].keys())
        assert (found["series"]["loss"]["value"], found["series"]["loss.trainer1"]["value"]) == ([0.5], [0.75])


async def test_graph_is_stored_by_hash_and_announced_in_order(server: Server) -> None:
    document = sample_graph()
    found_hash = graph_hash(document)
    async with server.attached() as trainer, server.browser() as browser:
        job_id, stream = trainer.registered["job_id"], trainer.registered["stream"]
        await browser.subscribe(1, topic="job", job_id=job_id)
        await trainer.frame(Kind.HELLO, body={"role": "trainer", "index": 0, "host": "real-host", "pid": 4242})
        await trainer.frame(Kind.GRAPH, body=document.model_dump(mode="json"))
        await trainer.frame(Kind.GRAPH_USED, body={"hash": found_hash})
        announced = (await browser.of("graph"))[0]
        assert (announced["hash"], announced["stream"]) == (found_hash, stream)
        answer = await server.http.get(f"/api/v1/graphs/{found_hash}")
        assert answer.json() == json.loads(canonical(document))
        assert "immutable" in answer.headers["cache-control"]
        [use] = (await get(server, f"/jobs/{job_id}/graphs"))["items"]
        assert (use["hash"], use["program"], use["replica_id"]) == (
            found_hash,
            "main",
            trainer.registered["replica_id"],
        )
        [replica] = (await server.job(job_id))["replicas"]
        assert (replica["graph_hash"], replica["host"], replica["pid"]) == (found_hash, "real-host", 4242)
        snapshot = await browser.subscribe(2, topic="job", job_id=job_id)
        assert snapshot["graphs"] == [{"replica_id": use["replica_id"], "stream": stream, "hash": found_hash}]


async def test_frames_reach_every_browser_unchanged_and_replay_later(server: Server) -> None:
    document = sample_graph()
    async with server.attached() as trainer, server.browser() as one, server.browser() as two:
        job_id, stream = trainer.registered["job_id"], trainer.registered["stream"]
        await one.subscribe(1, topic="job", job_id=job_id)
        await two.subscribe(1, topic="job", job_id=job_id, parts=["state", "sync"])
        await trainer.frame(Kind.GRAPH, body=document.model_dump(mode="json"))
        await trainer.frame(Kind.GRAPH_USED, body={"hash": graph_hash(document)})
        sent = [await trainer.frame(Kind.OP_SUMS, **sums(i)) for i in range(3)]
        sent.append(await trainer.frame(Kind.OP_EVENTS, **events(50), flags=1, step=9))
        names = (Column.PARAM, Column.COUNT, Column.BYTES, Column.TOTAL_NS, Column.WAIT_NS)
        sync = await trainer.frame(Kind.SYNC, columns={name: np.array([1]) for name in names})
        assert await one.received(5) == [*sent, sync]
        assert await two.received(1) == [sync]
        await trainer.frame(Kind.GOODBYE, body={})
        await server.job_in(job_id, "SUCCEEDED")
    async with server.browser() as late:
        await late.subscribe(7, topic="job", job_id=job_id)
        assert await late.received(5) == [*sent, sync]
        assert (await late.of("graph"))[0]["hash"] == graph_hash(document)
    raw = (await server.http.get(f"/api/v1/jobs/{job_id}/frames?stream={stream}&kinds=4&after_seq=2")).content
    assert split(raw) == sent[1:3]
    everything = (await server.http.get(f"/api/v1/jobs/{job_id}/frames")).content
    assert split(everything) == [*sent, sync]


async def test_logs_of_an_agent_reach_a_browser_from_where_it_left_off(server: Server) -> None:
    job = await server.submit()
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await agent.log(replica, 0, b"first line\n")
        async with server.browser() as browser:
            await browser.subscribe(1, topic="job", job_id=job["id"], log_offsets={replica["replica_id"]: 6})
            await browser.log_text("line\n")
            await agent.log(replica, 11, "zwölf\n".encode())
            assert await browser.log_text("zwölf") == "line\nzwölf\n"
            first = (await browser.of("log"))[0]
            assert (first["offset"], first["replica_id"]) == (6, replica["replica_id"])


async def test_list_of_jobs_is_followed_without_asking(server: Server) -> None:
    async with server.browser() as browser:
        snapshot = await browser.subscribe(1, topic="jobs")
        assert (snapshot["jobs"], snapshot["nodes"]) == ([], [])
        job = await server.submit()
        await browser.of("job", lambda m: m["job"]["id"] == job["id"] and m["job"]["state"] == "QUEUED")
        async with server.agent(await server.join()):
            await browser.of("job", lambda m: m["job"]["state"] == "STARTING")
            await browser.of("nodes", lambda m: [n["state"] for n in m["nodes"]] == ["READY"])


async def test_events_of_a_followed_job_arrive(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    async with sqlite_server.browser() as browser:
        await browser.subscribe(1, topic="job", job_id=job["id"])
        await sqlite_server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
        await browser.of("event", lambda m: m["event"]["to"] == "CANCELLED" and m["event"]["from"] == "STOPPING")


async def test_unsubscribed_browser_gets_nothing_more(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as browser:
        job_id = trainer.registered["job_id"]
        await browser.subscribe(1, topic="job", job_id=job_id)
        await trainer.frame(Kind.OP_SUMS, **sums())
        await browser.received(1)
        await browser.ws.send(json.dumps({"type": "unsubscribe", "id": 1}))
        await browser.subscribe(2, topic="jobs")  # answered in order, so the unsubscription has taken place
        before = len(browser.frames)
        await trainer.frame(Kind.OP_SUMS, **sums())
        await trainer.frame(Kind.PROGRESS, body={"done": 1, "total": 2})
        await browser.of("figures", lambda m: m["id"] == 2 and m["jobs"][job_id]["progress"] is not None)
        assert len(browser.frames) == before


async def test_stalled_browser_is_closed_and_slows_no_other(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, browser_high_water_bytes=1 << 18, browser_limit_bytes=1 << 20, browser_slow_s=0.5)
    async with running(settings) as server, server.attached() as trainer, server.browser() as fast:
        job_id = trainer.registered["job_id"]
        await fast.subscribe(1, topic="job", job_id=job_id)
        async with server.connect("/api/v1/stream", server.admin, max_queue=1) as stalled:
            await stalled.send(json.dumps({"type": "subscribe", "id": 1, "topic": "job", "job_id": job_id}))
            await stalled.recv()  # the snapshot; after it, nothing is read
            sent = 0

            async def closed() -> float:
                nonlocal sent
                await trainer.frame(Kind.OP_EVENTS, **events(8000, seed=sent))
                sent += 1
                await fast.received(sent)
                value: float = server.runtime.meters.slow_closed._value.get()
                return value

            await until_answer(closed, lambda n: n == 1.0)
            assert server.runtime.meters.dropped._value.get() > 0
            with pytest.raises(ConnectionClosed) as ended:
                await drain(stalled)
            assert ended.value.rcvd is not None
            assert ended.value.rcvd.code == 4408
        assert [decode_header(frame).seq for frame in fast.frames] == list(range(sent))


async def test_step_above_the_high_water_reaches_browsers(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as live, sqlite_server.browser() as later:
        job_id = trainer.registered["job_id"]
        await live.subscribe(1, topic="job", job_id=job_id)
        await trainer.frame(Kind.OP_EVENTS, **events(100_000))
        await live.received(1)
        await later.subscribe(1, topic="job", job_id=job_id)
        await later.received(1)
        assert [decode_header(one.frames[0]).count for one in (live, later)] == [100_000, 100_000]
        assert len(live.frames[0]) > sqlite_server.runtime.settings.browser_high_water_bytes


async def test_subscription_to_a_job_that_is_not_there_is_refused(sqlite_server: Server) -> None:
    async with sqlite_server.connect("/api/v1/stream", sqlite_server.admin) as ws:
        await ws.send(json.dumps({"type": "subscribe", "id": 1, "topic": "job", "job_id": "nope"}))
        with pytest.raises(ConnectionClosed) as closed:
            await ws.recv()
    assert closed.value.rcvd is not None
    assert "no job 'nope'" in closed.value.rcvd.reason


async def test_credit_of_an_older_dashboard_is_accepted(sqlite_server: Server) -> None:
    async with sqlite_server.browser() as browser:
        await browser.ws.send(json.dumps({"type": "credit", "rendered_seq": 7, "lag_ms": 3}))
        assert (await browser.subscribe(1, topic="jobs"))["type"] == "snapshot"


async def test_frame_of_an_unknown_stream_is_counted_and_dropped(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        foreign = Frame(Kind.PROGRESS, 999_999, 1, 0, body={"done": 1, "total": 2})
        await trainer.ws.send(encode(foreign))
        refused = sqlite_server.runtime.meters.refused.labels("unknown_stream")._value

        async def count() -> float:
            value: float = refused.get()
            return value

        await until_answer(count, lambda n: n == 1.0)


async def drain(ws: ClientConnection) -> None:
    async with asyncio.timeout(10):
        while True:
            await ws.recv()


def split(content: bytes) -> list[bytes]:
    frames = []
    while content:
        [size] = struct.unpack_from("<I", content)
        frames.append(content[4 : 4 + size])
        content = content[4 + size :]
    return frames
