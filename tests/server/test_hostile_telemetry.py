"""Frames that hold what cannot be stored: each is refused and counted, and costs nobody anything else."""

from __future__ import annotations

import json
import struct
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.server.graph_sample import sample_graph
from tests.server.harness import Server
from tests.support.waiting import until_answer

from penstock.protocol.frames import HEADER, HEADER_BYTES, Column, Frame, Kind, encode
from penstock_server.streams.tiers import SeriesKey

pytestmark = pytest.mark.asyncio

HUGE = 10**400
GRAPH = sample_graph().model_dump(mode="json")


def scalars(**changes: Any) -> tuple[Kind, dict[str, Any]]:
    return Kind.SCALARS, {"step": 1, "time_ns": 1, "values": {"auc": 0.5}, **changes}


REFUSED = [
    scalars(step=2**63),
    scalars(step=-1),
    scalars(time_ns=2**64),
    scalars(step=True),
    scalars(values={"\ud800": 1.0}),
    scalars(values={"a\0b": 1.0}),
    (Kind.HELLO, {"pid": 2**70}),
    (Kind.HELLO, {"host": "a\0b"}),
    (Kind.HELLO, {"endpoint": "\udfff"}),
    (Kind.PROGRESS, {"done": HUGE, "total": 1}),
    (Kind.PROGRESS, {"done": "many"}),
    (Kind.GRAPH, {**GRAPH, "program": "a\0b"}),
    (Kind.GRAPH, {**GRAPH, "program": "\ud800"}),
    (Kind.GRAPH_USED, {"hash": "\ud800"}),
    (Kind.GRAPH_USED, {"hash": "a\0"}),
]


def high_step() -> dict[Column, Any]:
    columns: dict[Column, Any] = {
        name: np.array([1])
        for name in (Column.TIME_NS, Column.LOSS, Column.SAMPLES, Column.STEP_NS, Column.SYNC_BYTES, Column.SYNC_NS)
    }
    columns[Column.STEP] = np.array([2**64 - 1], dtype=np.uint64)
    return columns


async def refused(server: Server) -> float:
    counts = {
        s.labels["reason"]: s.value
        for m in server.runtime.meters.refused.collect()
        for s in m.samples
        if s.name.endswith("_total")
    }
    assert counts.get("failed_frame", 0.0) == 0.0, "a frame was not checked before it was used"
    return counts.get("bad_frame", 0.0)


async def series(server: Server, job_id: str) -> dict[str, Any]:
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/metrics")
    found: dict[str, Any] = answer.json()["series"]
    return found


async def test_unstorable_frames_cost_no_connection_or_other_metrics(server: Server) -> None:
    async with server.attached() as trainer, server.attached("other", pid=8) as other:
        for kind, body in REFUSED:
            await trainer.frame(kind, body=body)
        await trainer.frame(Kind.METRICS, columns=high_step())
        await trainer.ws.send(b"no frame at all")
        await until_answer(lambda: refused(server), lambda n: n == len(REFUSED) + 2)
        for process in (trainer, other):
            await process.frame(Kind.SCALARS, body={"step": 1, "time_ns": 1, "values": {"auc": 0.5, "big": HUGE}})
            job_id = process.registered["job_id"]
            assert list(await until_answer(partial(series, server, job_id), bool)) == ["auc"]


async def test_bad_frame_of_a_trainer_leaves_its_agent_connected(server: Server) -> None:
    await server.submit()
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        for kind, body in REFUSED:
            await agent.frame(replica, kind, body=body)
        await until_answer(lambda: refused(server), lambda n: n == len(REFUSED))
        await agent.send(type="beat")
        assert await until_answer(agent.count_leases, bool) == 1


async def test_metrics_that_the_database_refuses_cost_only_their_job(server: Server) -> None:
    async with server.attached() as bad, server.attached("good", pid=8) as good:
        metrics, job_id = server.runtime.metrics, bad.registered["job_id"]
        metrics.add(SeriesKey(job_id, "a\0b" if not server.runtime.database.is_sqlite else "auc", 1), 2**70, 1, 0.5)
        await good.frame(Kind.SCALARS, body={"step": 1, "time_ns": 1, "values": {"auc": 0.5}})
        assert list(await until_answer(lambda: series(server, good.registered["job_id"]), bool)) == ["auc"]

        async def dropped() -> float:
            value: float = server.runtime.meters.refused.labels("bad_metrics")._value.get()
            return value

        assert await until_answer(dropped, bool) == 1.0
        await bad.frame(Kind.SCALARS, body={"step": 2, "time_ns": 2, "values": {"auc": 0.25}})
        found = await until_answer(lambda: series(server, job_id), bool)
        assert found["auc"]["value"] == [0.25]


async def test_json_of_a_number_beyond_every_bound_is_refused(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        text = json.dumps({"done": 1, "total": 2}).replace("1", "9" * 5000).encode()
        frame = bytearray(encode(Frame(Kind.PROGRESS, trainer.registered["stream"], 1, 0, body={})))
        body = struct.pack("<BBHI", 1, Column.JSON, 0, len(text)) + text + b"\0" * (-len(text) % 8)
        fields = list(HEADER.unpack_from(frame))
        fields[-1] = len(body)
        await trainer.ws.send(HEADER.pack(*fields)[:HEADER_BYTES] + body)
        await until_answer(lambda: refused(sqlite_server), lambda n: n == 1.0)
