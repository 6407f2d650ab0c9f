"""Real jobs of real processes, each slow for one cause: the first sentence of `penstock why JOB` names cause and place.

Slowness is made with what a machine has: a reader that sleeps, processes that get part of the time (SIGSTOP and SIGCONT
in turns), processes that are stopped, one thread, batches of one row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.server.harness import Server, running
from tests.support.waiting import until_answer

from penstock_server.settings import Settings
from penstock_worker import lease

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "diagnosis" / "slow_program.py"
STARTS_S = 180.0
NAMED_S = 120.0
CORES = 2
HOLD_S = 0.15
"""How long a throttled process is stopped, of `HOLD_S + GO_S`."""
GO_S = 0.02

pytestmark = [pytest.mark.asyncio, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with one node of `CORES` cores, on which replicas that reserve none are placed."""
    state, agent = tmp_path / "server", tmp_path / "agent"
    for folder in (state, agent):
        folder.mkdir(mode=0o700)
    async with running(Settings(host="127.0.0.1", port=0, state_dir=state, pserver_grace_s=60.0)) as made:
        node_id, token = await made.join(cpus=CORES)
        lease.write_json(agent / "node.json", {"url": made.url, "node_id": node_id, "token": token})
        process = await create_subprocess_exec(
            sys.executable, "-m", "penstock_worker", "--state-dir", str(agent), stderr=DEVNULL
        )
        yield made
        process.terminate()
        await process.wait()


@dataclass
class Slow:
    """One job with a cause. `part`: the process that gets part of the time; `stopped`: the one that is stopped."""

    name: str
    sentence: str
    options: tuple[str, ...] = ()
    servers: int = 0
    trainers: int = 1
    part: tuple[str, int] | None = None
    stopped: tuple[str, int] | None = None
    env: dict[str, str] = field(default_factory=dict)


SLOW = [
    Slow("a starved reader", r"input: \d+ % of the step waits for data: .* between steps", ("--read-ms", "60")),
    Slow("one thread", r"one thread computes on a machine of 2 cores",
         ("--threads", "1", "--width", "1024", "--rows", "512"), env={"OMP_NUM_THREADS": "1"}),
    Slow("batches of one row", r"batches are too small", ("--rows", "1", "--width", "16", "--layers", "12")),
    Slow("the reader of one trainer", r"input: \d+ % of the step of trainer 1 waits for data",
         ("--read-ms", "120", "--slow-reader-of", "1"), servers=2, trainers=2),
    Slow("one slow server", r"of each step waits for pserver-1", part=("pserver", 1), servers=2, trainers=2),
    Slow("one slow trainer", r"trainer 1 is .* ms later than the others", part=("trainer", 1), servers=2, trainers=2),
    Slow("a trainer that is stopped", r"trainer 1 has not finished step \d+ for \d+ s",
         stopped=("trainer", 1), servers=2, trainers=2),
    Slow("a server that is stopped", r"no trainer has finished a step for \d+ s, .*: they wait for pserver-1",
         stopped=("pserver", 1), servers=2, trainers=2),
    Slow("nothing", r"nothing is slow: \d+ % of the step computes",
         ("--width", "1024", "--rows", "512"), env={"CPU_NUM": "2", "OMP_NUM_THREADS": "1"}),
]  # fmt: skip


async def why(server: Server, job_id: str) -> list[str]:
    """Return the sentences that the command prints."""
    environ = {**os.environ, "PENSTOCK_URL": server.url, "PENSTOCK_TOKEN": server.admin}
    argv = [sys.executable, "-m", "penstock.cli", "why", job_id, "--json"]
    done = await asyncio.to_thread(
        subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [finding["sentence"] for finding in json.loads(done.stdout)["findings"]]


async def submitted(server: Server, slow: Slow) -> str:
    spec: dict[str, Any] = {
        "name": re.sub(r"\W+", "-", slow.name), "mode": "pserver" if slow.servers else "local",
        "entrypoint": [sys.executable, str(PROGRAM), *slow.options],
        "trainers": {"count": slow.trainers, "cpus": 0, "memory": "1MiB"},
        "env": {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)]), "CPU_NUM": "1", "OMP_NUM_THREADS": "1",
                "PENSTOCK_PS_START_S": "180", **slow.env},
    }  # fmt: skip
    if slow.servers:
        spec["pservers"] = {"count": slow.servers, "cpus": 0, "memory": "1MiB"}
    job_id: str = (await server.submit(**spec))["id"]
    return job_id


async def steps_of_all(server: Server, job_id: str, count: int) -> dict[str, int]:
    """Return the newest step of each trainer's series."""
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/metrics", params={"max_points": 4})
    series = answer.json()["series"]
    found = {name: max(one["step"]) for name, one in series.items() if name.startswith("step_ms")}
    return found if len(found) == count else {}


async def pid_of(server: Server, job_id: str, role: str, index: int) -> int:
    replicas = (await server.job(job_id))["replicas"]
    [pid] = [one["pid"] for one in replicas if (one["role"], one["index"]) == (role, index)]
    assert isinstance(pid, int)
    return pid


async def throttle(pid: int) -> None:
    """Let a process run for a part of the time, until cancelled."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(HOLD_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(GO_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("slow", SLOW, ids=lambda slow: slow.name.replace(" ", "-"))
async def test_the_first_sentence_names_the_cause(server: Server, slow: Slow) -> None:
    job_id = await submitted(server, slow)
    tasks: list[asyncio.Task[None]] = []
    stopped: int | None = None
    said: list[list[str]] = []
    try:
        await until_answer(
            lambda: steps_of_all(server, job_id, slow.trainers),
            lambda found: min(found.values(), default=0) > 30,
            STARTS_S,
        )
        if slow.part is not None:
            tasks.append(asyncio.create_task(throttle(await pid_of(server, job_id, *slow.part))))
        if slow.stopped is not None:
            stopped = await pid_of(server, job_id, *slow.stopped)
            os.kill(stopped, signal.SIGSTOP)
        until = time.monotonic() + NAMED_S
        named = 0
        while named < 2 and time.monotonic() < until:  # twice, so that no passing sentence counts
            await asyncio.sleep(3)
            said.append(await why(server, job_id))
            named = named + 1 if said[-1] and re.search(slow.sentence, said[-1][0]) else 0
        print("\n" + slow.name, *said[-1][:3], sep="\n  ")
        assert named == 2, said[-6:]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if stopped is not None:
            os.kill(stopped, signal.SIGCONT)
        await server.http.post(f"/api/v1/jobs/{job_id}:cancel")
        await until_answer(lambda: server.job(job_id), lambda job: job["state"] in ("CANCELLED", "FAILED"))
