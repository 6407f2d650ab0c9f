"""The asynchronous client against a real server."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from tests.server.harness import Server
from tests.support.waiting import until_async

from penstock.async_client import AsyncClient
from penstock.errors import Unavailable
from penstock.problems import AuthError, NotFound

pytestmark = pytest.mark.asyncio
SPEC = {"name": "job", "entrypoint": ["true"]}


async def test_waits_of_many_jobs_share_one_event_loop(sqlite_server: Server) -> None:
    async with AsyncClient(sqlite_server.url, token=sqlite_server.admin) as client:
        jobs = [await client.submit({**SPEC, "name": f"job-{number}"}, key=f"k{number}") for number in range(3)]
        waits = [asyncio.create_task(client.job(job["id"], wait_s=50.0)) for job in jobs]
        await until_async(lambda: len(sqlite_server.runtime.changes.jobs()) == 3)
        for job in jobs:
            assert (await client.cancel(job["id"]))["state"] == "CANCELLED"
        assert {job["state"] for job in await asyncio.gather(*waits)} == {"CANCELLED"}
        assert [job["name"] async for job in client.jobs()] == ["job-2", "job-1", "job-0"]
        assert [event["to"] async for event in client.events(jobs[0]["id"])][-1] == "CANCELLED"
        assert await client.replicas(jobs[0]["id"]) == []


async def test_snapshots_are_uploaded_and_downloaded(sqlite_server: Server, tmp_path: Path) -> None:
    content = gzip.compress(bytes(1024))
    (tmp_path / "up.tar.gz").write_bytes(content)
    async with AsyncClient(sqlite_server.url, token=sqlite_server.admin) as client:
        made = await client.upload_snapshot(tmp_path / "up.tar.gz")
        await client.download_snapshot(made["sha256"], tmp_path / "down.tar.gz")
        assert (tmp_path / "down.tar.gz").read_bytes() == content
        with pytest.raises(NotFound):
            await client.download_snapshot("0" * 64, tmp_path / "none")


async def test_errors_are_those_of_the_synchronous_client(sqlite_server: Server) -> None:
    async with AsyncClient(sqlite_server.url, token="wrong") as client:
        with pytest.raises(AuthError):
            await client.job("j")
        assert await client.is_ready()
    async with AsyncClient("http://127.0.0.1:9", token=None) as client:
        with pytest.raises(Unavailable, match="no Penstock server answers"):
            await client.job("j")
