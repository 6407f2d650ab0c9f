"""How quick the server is: bounds of the design, with room for a loaded machine stated where it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import event
from tests.server.harness import Server, running, settings_for
from tests.support.yardstick import slowdown

from penstock.protocol.frames import Column, Frame, Kind, encode
from penstock.protocol.jobspec import JobSpec
from penstock_server.auth.principal import Principal
from penstock_server.streams.ingest import FrameSender

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


def writes_of(server: Server, task: asyncio.Task[Any] | None = None) -> list[str]:
    """Every statement that writes, from now on: its first three words. `task`: its own alone, not those of loops."""
    found: list[str] = []

    def on_statement(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        words = statement.split()[:3]
        if task is not None and asyncio.current_task() is not task:
            return
        if words[0] in ("INSERT", "UPDATE", "DELETE"):
            found.append(" ".join(words[:2] if words[0] == "UPDATE" else words))

    event.listen(server.runtime.database.engine.sync_engine, "before_cursor_execute", on_statement)
    return found


async def test_submission_writes_job_and_history_once_each(sqlite_server: Server) -> None:
    spec = JobSpec(name="quick", entrypoint=["true"])
    asker = Principal("t", "user", "test", frozenset({"submit"}))
    writes = writes_of(sqlite_server, asyncio.current_task())
    job = await sqlite_server.runtime.jobs.submit(spec, asker, None)
    found = [one for one in writes if one != "UPDATE tokens"]
    assert found == ["INSERT INTO jobs", "INSERT INTO events"]
    events = (await sqlite_server.http.get(f"/api/v1/jobs/{job.id}/events")).json()["items"]
    assert [(one["from"], one["to"]) for one in events] == [(None, "CREATED"), ("CREATED", "QUEUED")]


async def test_starting_many_replicas_writes_them_at_once(sqlite_server: Server) -> None:
    node = await sqlite_server.join(cpus=64)
    writes = writes_of(sqlite_server)
    async with sqlite_server.agent(node):
        job = await sqlite_server.submit(trainers={"count": 40, "memory": "1MiB"})
        await sqlite_server.job_in(job["id"], "STARTING")
    assert writes.count("INSERT INTO replicas") == 1


async def test_hundred_thousand_events_a_second_cost_part_of_a_core(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        source = trainer.registered
        names = (Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD)
        columns = {name: np.arange(1000) % 60_000 for name in names}
        frames = [encode(Frame(Kind.OP_EVENTS, source["stream"], 1, i, columns=columns)) for i in range(100)]
        from_trainer = FrameSender(replica_id=source["replica_id"])
        begin = time.process_time()
        for frame in frames:
            await sqlite_server.runtime.ingest.take(from_trainer, frame)
        taken = (time.process_time() - begin) / slowdown()
        assert taken < 0.25, f"100 000 events took {taken * 1e3:.0f} ms of processor time"
