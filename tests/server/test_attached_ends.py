"""How an attached job ends: as its processes say, the newest of each role and index, and never by the server's hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.harness import FakeClock, Server, running, settings_for

from penstock.protocol.frames import Kind

pytestmark = pytest.mark.asyncio


async def test_process_that_failed_fails_its_job_and_is_quoted(server: Server) -> None:
    async with server.attached(pid=41) as trainer:
        await trainer.frame(Kind.GOODBYE, body={"failed": True, "error": "ValueError: bad\0 \ud800 batch"})
        job = await server.job_in(trainer.registered["job_id"], "SUCCEEDED", "FAILED")
    assert (job["state"], job["reason"]) == ("FAILED", "replica_failed")
    assert job["why"] == "trainer 0 on host 'h' failed: ValueError: bad \\ud800 batch"
    assert (job["replicas"][0]["state"], job["replicas"][0]["exit_code"]) == ("EXITED", None)


async def test_clean_end_invents_no_exit_code(sqlite_server: Server) -> None:
    for body in ({}, {"failed": False, "error": ""}):
        async with sqlite_server.attached() as trainer:
            await trainer.frame(Kind.GOODBYE, body=body)
            job = await sqlite_server.job_in(trainer.registered["job_id"], "SUCCEEDED", "FAILED")
        assert (job["state"], job["reason"], job["replicas"][0]["exit_code"]) == ("SUCCEEDED", "detached", None)


async def test_one_failed_process_of_two_fails_the_job(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as first, sqlite_server.attached(index=1, pid=8) as second:
        await first.frame(Kind.GOODBYE, body={"failed": True})
        await second.frame(Kind.GOODBYE, body={})
        job = await sqlite_server.job_in(first.registered["job_id"], "SUCCEEDED", "FAILED")
    assert job["why"] == "trainer 0 on host 'h' failed: it gave no error"


async def test_rerun_of_a_killed_script_ends_as_the_rerun_does(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        async with server.attached(pid=1):
            pass  # killed: no goodbye
        async with server.attached(pid=2) as again:
            await again.frame(Kind.GOODBYE, body={})
            job = await server.job_in(again.registered["job_id"], "SUCCEEDED", "FAILED")
    assert job["state"] == "SUCCEEDED"
    assert sorted(r["state"] for r in job["replicas"]) == ["EXITED", "LOST"]


async def test_attached_job_cannot_be_stopped_from_here(server: Server) -> None:
    async with server.attached(pid=77) as trainer:
        path = f"/api/v1/jobs/{trainer.registered['job_id']}:cancel"
        answer = await server.http.post(path)
        assert (answer.status_code, answer.json()["code"]) == (409, "job_attached")
        assert answer.json()["hint"] == "stop the process itself: 77 on 'h'"
        assert (await server.job(trainer.registered["job_id"]))["state"] == "RUNNING"
        await trainer.frame(Kind.GOODBYE, body={})
        await server.job_in(trainer.registered["job_id"], "SUCCEEDED")
        assert (await server.http.post(path)).status_code == 202
