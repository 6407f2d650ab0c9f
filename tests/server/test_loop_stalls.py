"""Requests that read much: no other request waits for them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from contextlib import suppress

import pytest
from sqlalchemy import text
from tests.server.harness import Server
from tests.support.waiting import until_answer
from tests.support.yardstick import slowdown

from penstock_server.streams.segments import MAGIC
from penstock_server.tables import SeriesRow

NUM_POINTS = 100_000
FILL = """
INSERT INTO metric_points (job_id, series, attempt, step, time_ns, value)
WITH RECURSIVE count(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM count WHERE i + 1 < :n)
SELECT :job, 'loss', 1, i, i, i % 97 FROM count
"""
RELEASED_AFTER_S = 40.0
LOOKS_EVERY_S = 0.001
LONGEST_S = 0.05
"""Of processor time, between two looks from the event loop. Reading `NUM_POINTS` at once takes a multiple."""


@pytest.mark.asyncio
async def test_no_request_waits_for_a_recording_that_is_read(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    folder = sqlite_server.runtime.settings.state_dir / "jobs" / job["id"] / "segments"
    folder.mkdir(parents=True)
    path = folder / "000001.seg"
    os.mkfifo(path)  # as a file of a disk that takes its time

    async def opened() -> int | None:
        with suppress(OSError):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        return None

    release = threading.Timer(RELEASED_AFTER_S, path.write_bytes, [MAGIC])
    release.start()
    reading = asyncio.create_task(sqlite_server.http.get(f"/api/v1/jobs/{job['id']}/frames", timeout=60))
    writer = await until_answer(opened, lambda found: found is not None or reading.done())
    release.cancel()
    assert writer is not None, "the event loop ran nothing while the file was read"
    assert (await sqlite_server.job(job["id"]))["state"] == "QUEUED"
    os.write(writer, MAGIC)
    os.close(writer)
    assert (await reading).status_code == 200


@pytest.mark.speed
@pytest.mark.asyncio
async def test_the_loop_turns_while_a_long_series_is_read(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    async with sqlite_server.runtime.database.write() as tx:
        await tx.session.execute(text(FILL), {"job": job["id"], "n": NUM_POINTS})
        tx.session.add(SeriesRow(job_id=job["id"], series="loss", attempt=1, first_step=0))
    gc.disable()  # a full collection of the test's process is no matter of the server's
    try:
        # A stall of the server's is in each; time that a host takes from a virtual machine is in one.
        longest = min(
            [
                await longest_turn(sqlite_server, f"/api/v1/jobs/{job['id']}/metrics?max_points={NUM_POINTS}")
                for _ in range(2)
            ]
        )
    finally:
        gc.enable()
    assert longest / slowdown() < LONGEST_S


async def longest_turn(server: Server, path: str) -> float:
    """Return the most processor time that the event loop's thread takes between two looks during a request."""
    reading = asyncio.create_task(server.http.get(path, timeout=60))
    longest, last = 0.0, time.thread_time()
    while not reading.done():
        await asyncio.sleep(LOOKS_EVERY_S)  # a loop that only turns would take the interpreter from who reads
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    assert (await reading).json()["series"]["loss"]["step"][-1] == NUM_POINTS - 1
    return longest
