"""Requests that wait for a change, and writes that name the version or the request that they belong to."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio

LONG_S = 60


async def waits(server: Server, job_id: str, **params: Any) -> asyncio.Task[httpx.Response]:
    """Send a request that waits; return it once the server has it."""
    asked = asyncio.create_task(server.http.get(f"/api/v1/jobs/{job_id}", params={"wait": LONG_S, **params}))

    async def is_waiting() -> bool:
        return job_id in server.runtime.changes.jobs()

    await until_answer(is_waiting, bool)
    return asked


async def test_wait_answers_when_the_job_ends(server: Server) -> None:
    job = await server.submit()
    asked = await waits(server, job["id"])
    await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
    answer = (await asked).json()
    assert answer["state"] == "CANCELLED"
    assert server.runtime.changes.jobs() == set()


async def test_wait_since_a_version_answers_at_the_next(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    job = await sqlite_server.submit()
    await sqlite_server.runtime.scheduling.run()  # says why it waits, which is a change, too
    job = await sqlite_server.job(job["id"])
    asked = await waits(sqlite_server, job["id"], since=job["version"])
    async with sqlite_server.agent(node):
        answer = (await asked).json()
    assert answer["version"] > job["version"]
    assert answer["state"] != "CANCELLED"


async def test_wait_of_a_changed_job_answers_at_once(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    answer = await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}", params={"wait": LONG_S, "since": 0})
    assert answer.json()["id"] == job["id"]
    assert answer.headers["ETag"] == f'"{answer.json()["version"]}"'


async def test_wait_ends_with_its_time_and_with_the_server(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    answer = await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}", params={"wait": 0.05})
    assert answer.json()["state"] == "QUEUED"
    asked = await waits(sqlite_server, job["id"])
    sqlite_server.runtime.changes.close()
    assert (await asked).json()["state"] == "QUEUED"


async def test_wait_for_a_job_that_is_not_there_is_404(sqlite_server: Server) -> None:
    answer = await sqlite_server.http.get("/api/v1/jobs/no-such-job", params={"wait": LONG_S})
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


async def test_cancel_of_a_job_that_changed_is_refused(server: Server) -> None:
    job = await server.submit()
    path = f"/api/v1/jobs/{job['id']}:cancel"
    await server.runtime.scheduling.run()  # says why it waits, which is a change, too
    current = (await server.http.get(f"/api/v1/jobs/{job['id']}")).headers["ETag"]
    stale = await server.http.post(path, headers={"If-Match": '"999"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "version_mismatch")
    assert (await server.job(job["id"]))["state"] == "QUEUED"
    assert (await server.http.post(path, headers={"If-Match": current})).status_code == 202
