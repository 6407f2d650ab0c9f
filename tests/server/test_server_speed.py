"""How quick the server is: bounds of the design, with room for a loaded machine stated where it is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tests.server.harness import Server, running, settings_for
from tests.yardstick import slowdown

from penstock.protocol.frames import Column, Frame, Kind, encode
from penstock_server.streams.ingest import Sender

pytestmark = [pytest.mark.asyncio, pytest.mark.speed]

SUBMIT_P99_S = 0.050
"""DESIGN 8: submit p99 below 50 ms, over HTTP on the loopback, SQLite on disk. Measured as the processor time of
client and server together, over how much slower the machine is just then."""


@pytest_asyncio.fixture
async def server_as_shipped(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(settings_for(tmp_path, tick_s=0.5, metrics_flush_s=0.25)) as server:
        yield server


async def test_submit_is_quick(server_as_shipped: Server) -> None:
    body = {"spec": {"name": "quick", "entrypoint": ["true"]}}
    p99 = []
    for _ in range(3):  # the best hundred of three: what runs beside them only adds
        slower, taken = slowdown(), []
        for _ in range(100):
            begin = time.process_time()
            answer = await server_as_shipped.http.post("/api/v1/jobs", json=body)
            taken.append((time.process_time() - begin) / slower)
            assert answer.status_code == 201
        p99.append(sorted(taken)[98])
    assert min(p99) < SUBMIT_P99_S, f"p99 of 100 submissions is {min(p99) * 1e3:.1f} ms of processor time"


async def test_hundred_thousand_events_a_second_cost_a_fraction_of_a_core(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        source = trainer.registered
        names = (Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD)
        columns = {name: np.arange(1000) % 60_000 for name in names}
        frames = [encode(Frame(Kind.OP_EVENTS, source["stream"], 1, i, columns=columns)) for i in range(100)]
        from_trainer = Sender(replica_id=source["replica_id"])
        begin = time.process_time()
        for frame in frames:
            await sqlite_server.runtime.ingest.take(from_trainer, frame)
        taken = (time.process_time() - begin) / slowdown()
        assert taken < 0.25, f"100 000 events took {taken * 1e3:.0f} ms of processor time"
