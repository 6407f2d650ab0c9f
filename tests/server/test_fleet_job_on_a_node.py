"""A fleet script, whole, on a real server and agent: over TLS, to the same losses as one process, and a quiet end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.server.harness import Server
from tests.support.certificates import certificates
from tests.support.nursery import Forked, Nursery

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/fleet/scripts/fit_a_line.py"
STEPS = "6"

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("sqlite_server", [{"pserver_grace_s": 60.0}], indirect=True)
async def test_fleet_job_over_tls_trains_as_one_process_and_ends_well(
    sqlite_server: Server, node: Path, nursery: Nursery, tmp_path: Path
) -> None:
    environ = {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)]), "CPU_NUM": "1", "OMP_NUM_THREADS": "1"}
    one = {"count": 1, "memory": "1MiB"}
    job = await sqlite_server.submit(
        mode="pserver",
        trainers=one,
        pservers=one,
        entrypoint=[sys.executable, str(SCRIPT), "--steps", STEPS, "--out", str(tmp_path / "job")],
        env={**environ, **certificates(tmp_path / "tls"), "PENSTOCK_PS_TRANSPORT": "tcp"},
    )
    argv = [str(SCRIPT), "--local", "--steps", STEPS, "--out", str(tmp_path / "alone")]
    alone = await asyncio.to_thread(Forked, nursery, tmp_path / "process", argv, environ)
    assert await asyncio.to_thread(alone.end) == 0, alone.errors
    over = await sqlite_server.job_in(job["id"], "SUCCEEDED", "FAILED")
    assert (over["state"], over["why"]) == ("SUCCEEDED", "every trainer ended with exit code 0")
    assert [r["exit_code"] for r in over["replicas"]] == [0, 0], "the server ended by itself"
    losses = [np.load(tmp_path / name / "result.npz")["losses"] for name in ("job", "alone")]
    assert np.abs(losses[0] - losses[1]).max() < 1e-12  # float64; slices of a sum in another order
    assert losses[0][-1] < losses[0][0]
