"""Real jobs of real processes, slow for one cause or for none: the first sentence names cause and place in seconds.

Slowness is made with what a machine has: a reader that sleeps or parses, processes that get part of the time (SIGSTOP
and SIGCONT in turns), processes that are stopped, one core, batches of one row, a layer in float64, ids of one shard, a
disk that the job fills, a relay that passes few bytes a second. Questions go to the API as the dashboard asks them, the
last one through `penstock why`.
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
NAMED_S = 60.0
ASKED_EVERY_S = 0.5
LOOKED_AT_S = 8.0
"""How long a healthy job is looked at."""
MOST_OFTEN = 0.8
"""Share of the answers about a healthy job that say so: other processes of the machine may disturb it."""
CORES = 2
HOLD_S = 0.15
"""How long a throttled process is stopped, of `HOLD_S + GO_S`."""
GO_S = 0.02
SMALL_DISK = (
    "mount -t tmpfs -o size=48m tmpfs {0} && cp {1} {0}/node.json && exec {2} -m penstock_worker --state-dir {0}"
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.soak, pytest.mark.timeout(600)]


@contextlib.asynccontextmanager
async def cluster(folder: Path, *, small_disk: bool = False) -> AsyncIterator[Server]:
    """A server with one node of `CORES` cores, on which replicas that reserve none are placed."""
    state, agent = folder / "server", folder / "agent"
    for made in (state, agent):
        made.mkdir(mode=0o700)
    async with running(Settings(host="127.0.0.1", port=0, state_dir=state, pserver_grace_s=60.0)) as server:
        node_id, token = await server.join(cpus=CORES)
        node = folder / "node.json" if small_disk else agent / "node.json"
        lease.write_json(node, {"url": server.url, "node_id": node_id, "token": token})
        argv = [sys.executable, "-m", "penstock_worker", "--state-dir", str(agent)]
        if small_disk:
            argv = ["unshare", "-m", "sh", "-c", SMALL_DISK.format(agent, node, sys.executable)]
        process = await create_subprocess_exec(*argv, stderr=DEVNULL)
        yield server
        process.terminate()
        await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@dataclass
class Job:
    """One job. `part`: processes that get part of the time; `stopped`: those that are stopped; both once it trains."""

    name: str
    sentence: str
    options: str = ""
    servers: int = 0
    trainers: int = 1
    part: tuple[tuple[str, int], ...] = ()
    stopped: tuple[tuple[str, int], ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    small_disk: bool = False


ONE_CORE = ("taskset", "-c", "0")
INPUT = r"input: \d+ % of the step{} waits for data"
SERVER = r"of each step waits for {}"
LATE = r"trainer {} is .* ms later than the others"
SILENT = r"trainer {} has not finished step \d+ for \d+ s"
LINK = r"the link from trainer {} on \S+ to pserver-{} carries \d+(\.\d)? MB/s; exchanges wait \d+ % of the step"
REMOTE = {"PENSTOCK_PS_TRANSPORT": "tcp"}
HANGS = r"no trainer has finished a step for \d+ s, .*: they wait for {}"
BOTH = (("pserver", 0), ("pserver", 1))
ENCODER = "--model transformer --width 128 --rows 64 --layers"
SLOW = [
    Job("a reader that sleeps", INPUT.format(""), "--read-ms 60"),
    Job("a reader that parses", INPUT.format(""), "--read-bytes 1000000"),
    Job("a reader that sleeps, LeNet", INPUT.format(""), "--model lenet --rows 64 --read-ms 80"),
    Job("a reader that sleeps, transformer", INPUT.format(""), f"{ENCODER} 2 --read-ms 80"),
    Job("a reader that sleeps, async", INPUT.format(""), "--mode async --read-ms 120", servers=1),
    Job("the reader of trainer 0", INPUT.format(" of trainer 0"), "--read-ms 150 --slow-reader-of 0",
        servers=2, trainers=2),
    Job("the reader of trainer 1", INPUT.format(" of trainer 1"), "--read-ms 150 --slow-reader-of 1",
        servers=2, trainers=2),
    Job("one core", "one thread computes on a machine of 2 cores", "--width 1024 --rows 512", prefix=ONE_CORE),
    Job("one core, LeNet", "one thread computes on a machine of 2 cores", "--model lenet", prefix=ONE_CORE),
    Job("one core, transformer", "one thread computes on a machine of 2 cores", f"{ENCODER} 3", prefix=ONE_CORE),
    Job("batches of one row", "batches are too small", "--rows 1 --width 16 --layers 12"),
    Job("batches of one row, two threads", "batches are too small", "--rows 1 --width 16 --layers 12 --threads 2"),
    Job("batches of one row, transformer", "batches are too small",
        "--model transformer --width 16 --rows 1 --layers 6"),
    Job("slow server 0", SERVER.format("pserver-0"), part=(("pserver", 0),), servers=2, trainers=2),
    Job("slow server 1", SERVER.format("pserver-1"), part=(("pserver", 1),), servers=2, trainers=2),
    Job("slow server 1, one trainer", SERVER.format("pserver-1"), part=(("pserver", 1),), servers=2),
    Job("slow server 2 of 3", SERVER.format("pserver-2"), part=(("pserver", 2),), servers=3),
    Job("the only server", SERVER.format("(pserver-0|.*fc)"), part=(("pserver", 0),), servers=1),
    Job("both servers", SERVER.format(r"(the 2 parameter servers|pserver-\d)"), part=BOTH, servers=2),
    Job("slow trainer 0", LATE.format(0), part=(("trainer", 0),), servers=2, trainers=2),
    Job("slow trainer 1", LATE.format(1), part=(("trainer", 1),), servers=2, trainers=2),
    Job("slow trainer 2 of 3", LATE.format(2), part=(("trainer", 2),), servers=1, trainers=3),
    Job("stopped trainer 0", SILENT.format(0), stopped=(("trainer", 0),), servers=2, trainers=2),
    Job("stopped trainer 1", SILENT.format(1), stopped=(("trainer", 1),), servers=2, trainers=2),
    Job("the only trainer stopped", r"no trainer has finished a step for \d+ s", stopped=(("trainer", 0),)),
    Job("stopped server 0", HANGS.format("pserver-0"), stopped=(("pserver", 0),), servers=2, trainers=2),
    Job("stopped server 1", HANGS.format("pserver-1"), stopped=(("pserver", 1),), servers=2, trainers=2),
    Job("layer 3 of 6 in float64", r"`encoder_0\.layers\.3` takes .* times the median of its 5 siblings",
        f"{ENCODER} 6 --odd-layer 3"),
    Job("layer 0 of 5 in float64", r"`encoder_0\.layers\.0` takes .* times the median of its 4 siblings",
        f"{ENCODER} 5 --odd-layer 0"),
    Job("a shard with all ids", SERVER.format(r"pserver-0, which has \d+ % of the ids of `table`"),
        "--words 1000000 --one-shard --rows 1024 --width 64 --layers 1", servers=2),
    Job("a slow link, one trainer", LINK.format(0, 1), "--slow-link 1", servers=2, env=REMOTE),
    Job("a slow link of two trainers", LINK.format(1, 0), "--slow-link 0 --slow-link-of 1", servers=2, trainers=2,
        env=REMOTE),
    Job("the only link", LINK.format(0, 0), "--slow-link 0", servers=1, env=REMOTE),
    Job("all links of a trainer", r"the links from trainer 0 on \S+ to 2 servers carry \d+ MB/s each",
        "--slow-link 0 --slow-link 1", servers=2, trainers=2, env=REMOTE),
    Job("a full disk", r"the disk of .* is full", "--fill-after 60", small_disk=True),
]  # fmt: skip
LARGE = "--width 512 --rows 2048"
HEALTHY = [
    Job("default settings", "", "--width 1024 --rows 512"),
    Job("default settings, LeNet", "", "--model lenet --rows 128"),
    Job("default settings, transformer", "", f"{ENCODER} 4"),
    Job("CPU_NUM unset", "", "--width 1024 --rows 512", env={"CPU_NUM": ""}),
    Job("two replicas, LeNet", "", "--model lenet --rows 256", env={"CPU_NUM": "2"}),
    Job("two replicas, Reduce", "", "--width 1024 --rows 512",
        env={"CPU_NUM": "2", "PENSTOCK_REDUCE_STRATEGY": "Reduce"}),
    Job("two threads", "", "--width 1024 --rows 512 --threads 2"),
    Job("one server, sync", "", LARGE, servers=1),
    Job("two servers, sync", "", LARGE, servers=2),
    Job("one server, async", "", f"{LARGE} --mode async", servers=1),
]  # fmt: skip


async def findings(server: Server, job_id: str) -> list[str]:
    """Return the sentences of the API, as the dashboard asks for them."""
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/why")
    return [finding["sentence"] for finding in answer.json()["findings"]]


async def why(server: Server, job_id: str) -> list[str]:
    """Return the sentences that the command prints."""
    environ = {**os.environ, "PENSTOCK_URL": server.url, "PENSTOCK_TOKEN": server.admin}
    argv = [sys.executable, "-m", "penstock.cli", "why", job_id, "--json"]
    done = await asyncio.to_thread(
        subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [finding["sentence"] for finding in json.loads(done.stdout)["findings"]]


async def submitted(server: Server, job: Job) -> str:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)]), "CPU_NUM": "1",
           "PENSTOCK_PS_START_S": "180", **job.env}  # fmt: skip
    spec: dict[str, Any] = {
        "name": re.sub(r"\W+", "-", job.name).lower(), "mode": "pserver" if job.servers else "local",
        "entrypoint": [*job.prefix, sys.executable, str(PROGRAM), *job.options.split()],
        "trainers": {"count": job.trainers, "cpus": 0, "memory": "1MiB"},
        "env": {name: value for name, value in env.items() if value},
    }  # fmt: skip
    if job.servers:
        spec["pservers"] = {"count": job.servers, "cpus": 0, "memory": "1MiB"}
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


@contextlib.asynccontextmanager
async def training(server: Server, job: Job) -> AsyncIterator[str]:
    """A job that has made steps and has, from now on, its cause; it is cancelled at the end."""
    job_id = await submitted(server, job)
    tasks: list[asyncio.Task[None]] = []
    stopped: list[int] = []
    try:
        await until_answer(
            lambda: steps_of_all(server, job_id, job.trainers),
            lambda found: min(found.values(), default=0) > 30,
            STARTS_S,
        )
        await asyncio.sleep(4.5 if job.part or job.stopped else 0)  # so that there is a time without the cause
        part = [await pid_of(server, job_id, *one) for one in job.part]
        tasks.extend(asyncio.create_task(throttle(pid)) for pid in part)
        for one in job.stopped:
            stopped.append(await pid_of(server, job_id, *one))
            os.kill(stopped[-1], signal.SIGSTOP)
        yield job_id
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await server.http.post(f"/api/v1/jobs/{job_id}:cancel")
        await until_answer(lambda: server.job(job_id), lambda now: now["state"] in ("CANCELLED", "FAILED"))


def told(job: Job, *words: str) -> None:
    print("\n|", job.name, "|", " | ".join(words), "|")


@pytest.mark.parametrize("job", SLOW, ids=lambda job: re.sub(r"\W+", "-", job.name))
async def test_the_first_sentence_names_the_cause(server: Server, job: Job, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        used = await stack.enter_async_context(cluster(tmp_path, small_disk=True)) if job.small_disk else server
        job_id = await stack.enter_async_context(training(used, job))
        began_s = time.monotonic()
        first_s = 0.0
        said: list[str] = []
        while not first_s and time.monotonic() < began_s + NAMED_S:
            said = (await findings(used, job_id))[:3]
            first_s = time.monotonic() - began_s if said and re.search(job.sentence, said[0]) else 0.0
            await asyncio.sleep(ASKED_EVERY_S)
        again = await why(used, job_id)
        told(job, f"{first_s:.1f} s", again[0])
        assert first_s, said
        assert re.search(job.sentence, again[0]), again


@pytest.mark.parametrize("job", HEALTHY, ids=lambda job: re.sub(r"\W+", "-", job.name))
async def test_nothing_is_slow_in_a_healthy_job(server: Server, job: Job) -> None:
    async with training(server, job) as job_id:
        await asyncio.sleep(4)  # the first steps prepare plans
        said: list[str] = []
        until = time.monotonic() + LOOKED_AT_S
        while time.monotonic() < until:
            said.append((await findings(server, job_id))[0])
            await asyncio.sleep(ASKED_EVERY_S)
        healthy = [one for one in said if one.startswith("nothing is slow: ")]
        others = sorted(set(said) - set(healthy))
        told(job, f"{len(healthy)} of {len(said)}", healthy[-1] if healthy else "", *others[:2])
        assert len(healthy) >= MOST_OFTEN * len(said), others
