"""`penstock export` of a real job of two trainers and two parameter servers: four processes, every recorded slice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.export.trace_reader import read
from tests.server.harness import Server

from penstock.export.recording import cut
from penstock.protocol.frames import Column, Frame, Kind, decode

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/fleet/scripts/fit_a_line.py"

pytestmark = [pytest.mark.asyncio, pytest.mark.soak, pytest.mark.timeout(400)]


async def recorded(server: Server, job_id: str) -> list[Frame]:
    """Return the frames of operators that the server has of a job."""
    params = {"kinds": f"{Kind.OP_EVENTS:d}", "limit_bytes": f"{16 << 20}"}
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/frames", params=params)
    assert answer.status_code == 200, answer.text
    return [decode(frame) for frame in cut(answer.content)]


async def exported(server: Server, *arguments: str) -> dict[str, Any]:
    """Run `penstock export … --json`; return what it prints."""
    argv = [sys.executable, "-m", "penstock.cli", "export", *arguments, "--json"]
    environ = {**os.environ, "PENSTOCK_URL": server.url, "PENSTOCK_TOKEN": server.admin}
    done = await asyncio.to_thread(
        subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("sqlite_server", [{"pserver_grace_s": 60.0}], indirect=True)
async def test_trace_of_four_processes_holds_what_was_recorded(
    sqlite_server: Server, node: Path, tmp_path: Path
) -> None:
    two = {"count": 2, "memory": "1MiB"}
    job = await sqlite_server.submit(
        mode="pserver",
        trainers=two,
        pservers=two,
        entrypoint=[sys.executable, str(SCRIPT), "--compiled", "--steps", "8", "--out", str(tmp_path / "job")],
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)]),
            "CPU_NUM": "1",
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_PS_START_S": "120",
        },
    )
    over = await sqlite_server.job_in(job["id"], "SUCCEEDED", "FAILED")
    assert over["state"] == "SUCCEEDED", over["why"]
    frames = await recorded(sqlite_server, job["id"])
    path = tmp_path / "trace.gz"
    said = await exported(sqlite_server, job["id"], "--format", "perfetto", "-o", str(path))
    trace = await asyncio.to_thread(read, path)

    assert sorted(name for name, _ in trace.processes.values()) == ["pserver 0", "pserver 1", "trainer 0", "trainer 1"]
    operators = [one for one in trace.slices if one.track[-1].startswith("thread")]
    assert len(operators) == said["slices"] == sum(frame.count for frame in frames) > 0
    durations = [int(d) for frame in frames for d in frame.columns[Column.DURATION_NS]]
    assert sorted(one.duration_ns for one in operators) == sorted(durations)
    assert {one.track[0] for one in operators} == {"trainer 0", "trainer 1"}
    assert "unknown operator" not in {one.name for one in operators}
    assert any(f"{SCRIPT.name}:" in one.args["line"] for one in operators), "exchange and optimizer have no line"
    exchanges = {one.track for one in trace.slices if one.track[-1].startswith("exchange with")}
    assert {(f"trainer {i}", f"exchange with pserver {j}") for i in range(2) for j in range(2)} <= exchanges
    assert {(f"pserver {i}", f"exchange with trainer {j}") for i in range(2) for j in range(2)} <= exchanges
    assert "loss" in trace.counters and said["points"] > 0
