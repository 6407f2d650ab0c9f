"""Limits of a job's replicas, and the user as whom they run, through a real server and a real agent."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer

from penstock.process import cell
from penstock_worker import lease

pytestmark = pytest.mark.asyncio
EATER = "held = []\nfor _ in range(512): held.append(b'x' * (1 << 20))"


async def events(server: Server, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await server.http.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
    return found


async def test_a_job_that_takes_too_much_memory_ran_out_of_it(sqlite_server: Server, node: Path) -> None:
    job = await sqlite_server.submit(
        mode="command",
        entrypoint=[sys.executable, "-c", EATER],
        trainers={"count": 1, "cpus": 0, "memory": "1MiB"},
        limits={"memory": "64MiB", "open_files": 256},
        restart={"max_restarts": 0},
    )
    job = await sqlite_server.job_in(job["id"], "SUCCEEDED", "FAILED")
    found = await events(sqlite_server, job["id"])
    [running] = [one for one in found if (one["kind"], one["to"]) == ("replica", "RUNNING")]
    probe = cell.make("probe", cell.Limits(memory_bytes=64 << 20))
    probe.remove()
    assert job["state"] == "FAILED"
    if probe.missing:
        assert running["detail"].startswith("limits hold for each process alone")
        assert "exited with code 1" in job["why"]
    else:
        assert running["detail"] == "limits hold by control groups"
        assert "ran out of memory: 6" in job["why"]
        assert "limits.memory is 64 MiB" in job["why"]


async def test_jobs_run_as_another_user(sqlite_server: Server) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone may become another user")
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-as-"))  # pytest's own folders let no other user in
    node_id, token = await sqlite_server.join()
    lease.write_json(folder / "node.json", {"url": sqlite_server.url, "node_id": node_id, "token": token})
    line = (sys.executable, "-m", "penstock_worker", "--state-dir", str(folder), "--run-as", "nobody")
    agent = await create_subprocess_exec(*line, stderr=DEVNULL)
    try:
        script = (
            'id -un; touch made; stat -c %U made . "$PENSTOCK_TELEMETRY_SOCKET"; echo $HOME; '
            "cat ../../../node.json ../replica.json ../guard-order.json; ls ../../.."
        )
        job = await sqlite_server.submit(
            mode="command",
            entrypoint=["/bin/sh", "-c", script],
            trainers={"count": 1, "cpus": 0, "memory": "1MiB"},
            restart={"max_restarts": 0},
        )
        job = await sqlite_server.job_in(job["id"], "SUCCEEDED", "FAILED")

        async def log() -> str:
            piece = (await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}/logs")).json()
            return str(piece["text"]) if piece["eof"] else ""

        said = await until_answer(log, bool)
        assert said.split("\n")[:5] == ["nobody", "nobody", "nobody", "nobody", "/nonexistent"], said
        assert said.count("Permission denied") == 3, said  # and node.json is hidden
        assert token not in said
    finally:
        agent.terminate()
        await agent.wait()
        await asyncio.to_thread(shutil.rmtree, folder)
