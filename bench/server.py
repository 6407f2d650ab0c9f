"""`bench server`: a control plane with many agents, jobs and browsers, on a database with a long history.

A real server process; simulated agents, which send heartbeats and reports and start nothing; browsers that watch the
list of jobs, or one job; a client in a process of its own. Each round: the database is filled with finished jobs, the
server started, nodes joined, jobs submitted until `--jobs` are active; then, for `--seconds`, jobs end and new ones are
submitted at `--rate`, while `--reporting` jobs send a point of metrics each second. At last an agent falls silent, and
the server is killed and started again.

`submit_p99_ms`: from the request to its answer. `placement_p95_ms`: from the request until an agent has the order; with
`--waiting` jobs ahead, from the report of an end until an agent has the next order. `restart_s`: from the start of the
process until `/readyz` answers 200. `dead_node_s`: from an agent's last heartbeat until the node is UNREACHABLE.
`…_cpu_ms`: processor time of the server alone: of a submission, with nothing else going on; of a job from submission to
its end, with one agent; `idle_cpu_share`: of one core, with all agents and browsers connected and nothing submitted.
"""

from __future__ import annotations

import argparse
import asyncio
import json as json_format
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.server.postgres_cluster import cluster

from bench._server_history import fill
from bench._server_load import Agent, Load, browse, join
from bench.report import Report

ROUNDS = 1
READY_LIMIT_S = 120.0
PLACE_LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1000, help="jobs that run (%(default)s)")
    parser.add_argument("--browsers", type=int, default=50)
    parser.add_argument("--finished", type=int, default=100_000, help="jobs that have ended before (%(default)s)")
    parser.add_argument("--waiting", type=int, default=0, help="jobs that wait for room throughout (%(default)s)")
    parser.add_argument("--reporting", type=int, default=200, help="jobs that send metrics each second (%(default)s)")
    parser.add_argument("--rate", type=float, default=5.0, help="submissions and ends a second (%(default)s)")
    parser.add_argument("--cost-jobs", type=int, default=200, help="to measure processor time with (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--limit-s", type=float, default=290.0, help="of a round; it ends with an error (%(default)s)")


@dataclass(slots=True)
class Site:
    """A server's folder and database, and its present process."""

    folder: Path
    database: str
    process: subprocess.Popen[bytes] | None = None
    url: str = ""

    def start(self) -> float:
        """Start the server; return the seconds until it was ready."""
        arguments = ["--port", "0", "--state-dir", str(self.folder), "--database-url", self.database]
        address = self.folder / "server.json"
        address.unlink(missing_ok=True)
        began = time.monotonic()
        env = {**os.environ, "PENSTOCK_SERVER_LOG_LEVEL": "warning"}
        self.process = subprocess.Popen([sys.executable, "-m", "penstock_server", *arguments], env=env)
        while time.monotonic() - began < READY_LIMIT_S:
            try:
                self.url = json_format.loads(address.read_text())["url"]
                if httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200:
                    return time.monotonic() - began
            except (OSError, ValueError, httpx.TransportError):  # not yet there, or not yet written
                pass
            time.sleep(0.01)
        raise SystemExit("bench server: the server was not ready in time")

    def kill(self) -> None:
        """Kill the server."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def cpu_s(self) -> float:
        """Return the processor time that the server has used."""
        assert self.process is not None
        used = psutil.Process(self.process.pid).cpu_times()
        return used.user + used.system

    @property
    def token(self) -> str:
        """Return the administrator's token."""
        return (self.folder / "admin.token").read_text().strip()


@contextmanager
def site(database: str) -> Iterator[Site]:
    """Make a folder, and for PostgreSQL a private cluster; remove both, and the server, at the end."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        state = Path(folder) / "state"
        state.mkdir(mode=0o700)
        if database == "sqlite":
            made = Site(state, f"sqlite+aiosqlite:///{state / 'penstock.db'}")
            try:
                yield made
            finally:
                made.kill()
            return
        with cluster() as postgres:
            made = Site(state, postgres.url)
            try:
                yield made
            finally:
                made.kill()


@dataclass(slots=True)
class Round:
    """The measurements of one round: samples by name."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, *values: float) -> None:
        """Add samples."""
        self.samples.setdefault(name, []).extend(values)


async def submit(where: Site, count: int, per_s: float) -> AsyncIterator[tuple[str, float, float]]:
    """Submit from another process; give (job, sent, answered) as the answers come."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench._server_submit", where.url, where.token, str(count), str(per_s),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async for line in process.stdout:
        job_id, sent_at, answered_at = json_format.loads(line)
        yield job_id, sent_at, answered_at
    if await process.wait():
        raise SystemExit("bench server: the client failed")


async def _until(done: Any, limit_s: float = PLACE_LIMIT_S) -> None:
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > limit_s:
            raise SystemExit("bench server: the server did not get there in time")
        await asyncio.sleep(0.02)


@asynccontextmanager
async def connected(url: str, agents: list[Agent]) -> AsyncIterator[None]:
    """Connect agents while the block runs."""
    tasks = [asyncio.create_task(agent.run(url)) for agent in agents]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_costs(where: Site, http: httpx.AsyncClient, asked: argparse.Namespace, found: Round) -> None:
    """Measure the processor time of a submission, and of a job from submission to its end."""
    before = where.cpu_s()
    first = [job async for job, *_ in submit(where, asked.cost_jobs, 0)]
    found.add("submit_cpu_ms", 1e3 * (where.cpu_s() - before) / asked.cost_jobs)
    for job_id in first:
        await http.post(f"/api/v1/jobs/{job_id}:cancel")
    load = Load()
    agents = await join(http, load, 1, 16)
    async with connected(where.url, agents):
        await asyncio.sleep(1.0)
        before, began, ended = where.cpu_s(), time.monotonic(), 0
        async for _ in submit(where, asked.cost_jobs, 0):
            ended += await _end_all(load)
        while ended < asked.cost_jobs:
            await asyncio.sleep(0.01)
            ended += await _end_all(load)
        await _until_over(http, began)
        found.add("job_cpu_ms", 1e3 * (where.cpu_s() - before) / asked.cost_jobs)
        found.add("jobs_per_s", asked.cost_jobs / (time.monotonic() - began))


async def _end_all(load: Load) -> int:
    count = 0
    while load.running:
        agent, replica = load.running.popleft()
        await agent.end(replica)
        count += 1
    return count


async def _until_over(http: httpx.AsyncClient, began: float) -> None:
    for state in ("QUEUED", "STARTING", "RUNNING", "STOPPING"):
        while (await http.get("/api/v1/jobs", params={"state": state, "page_size": 1})).json()["items"]:
            if time.monotonic() - began > PLACE_LIMIT_S:
                raise SystemExit(f"bench server: jobs stay {state}")
            await asyncio.sleep(0.02)


async def measure_load(where: Site, http: httpx.AsyncClient, asked: argparse.Namespace, found: Round) -> None:
    """Measure submissions and placements with everything connected, then how soon a dead node is noticed."""
    load = Load()
    cpus = -(-asked.jobs // asked.agents) if asked.waiting else 16  # with jobs that wait, every CPU is taken
    agents = await join(http, load, asked.agents, cpus)
    async with connected(where.url, agents):
        if not asked.waiting:
            async for _ in submit(where, asked.jobs, 0):
                pass
        await _until(lambda: len(load.running) >= min(asked.jobs, asked.agents * cpus))
        watched = [replica["job_id"] for _, replica in list(load.running)[: asked.browsers // 2]]
        topics = [None] * (asked.browsers - len(watched)) + watched
        browsers = [asyncio.create_task(browse(where.url, where.token, load, topic)) for topic in topics]
        await asyncio.sleep(3.0)
        before, began = where.cpu_s(), time.monotonic()
        await asyncio.sleep(5.0)
        found.add("idle_cpu_share", (where.cpu_s() - before) / (time.monotonic() - began))
        await _steady(where, load, asked, found)
        await _silence(http, agents[0], found)
        for browser in browsers:
            browser.cancel()
        await asyncio.gather(*browsers, return_exceptions=True)


async def _steady(where: Site, load: Load, asked: argparse.Namespace, found: Round) -> None:
    """Submit and end at the same rate, while some jobs report."""
    ends: list[float] = []
    placed: list[tuple[str, float]] = []
    load.on_placed = lambda job_id: placed.append((job_id, time.monotonic()))
    sent: dict[str, float] = {}
    reporting = asyncio.create_task(_report(load, asked.reporting))
    before, began = where.cpu_s(), time.monotonic()
    async for job_id, sent_at, answered_at in submit(where, round(asked.seconds * asked.rate), asked.rate):
        sent[job_id] = sent_at
        found.add("submit_ms", 1e3 * (answered_at - sent_at))
        agent, replica = load.running.popleft()
        ends.append(time.monotonic())
        await agent.end(replica)
    found.add("load_cpu_share", (where.cpu_s() - before) / (time.monotonic() - began))
    await _until(lambda: len(placed) >= len(ends))
    reporting.cancel()
    if asked.waiting:  # in order: one end makes room for one job
        found.add("placement_s", *(at - end for (_, at), end in zip(placed, ends, strict=False)))
    else:
        found.add("placement_s", *(at - sent[job_id] for job_id, at in placed if job_id in sent))


async def _report(load: Load, count: int) -> None:
    step = 0
    while True:
        began = time.monotonic()
        step += 1
        for agent, replica in list(load.running)[-count:]:
            await agent.metrics(replica, step)
        await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


async def _silence(http: httpx.AsyncClient, agent: Agent, found: Round) -> None:
    """Have an agent fall silent without closing its connection; measure until its node is UNREACHABLE."""
    agent.silent = True
    began = time.monotonic()
    while True:
        nodes = (await http.get("/api/v1/nodes")).json()["items"]
        if next(node["state"] for node in nodes if node["id"] == agent.node_id) == "UNREACHABLE":
            break
        if time.monotonic() - began > 60:
            raise SystemExit("bench server: a dead node was not noticed")
        await asyncio.sleep(0.1)
    found.add("dead_node_s", time.monotonic() - began)


async def _bounded(where: Site, asked: argparse.Namespace, found: Round) -> None:
    try:
        async with asyncio.timeout(asked.limit_s):
            await _round(where, asked, found)
    except TimeoutError as error:
        raise SystemExit(f"bench server: not done within {asked.limit_s:g} s; measured so far: {found}") from error


async def _round(where: Site, asked: argparse.Namespace, found: Round) -> None:
    await fill(where.database, finished=asked.finished, waiting=0)
    where.start()
    headers = {"Authorization": f"Bearer {where.token}"}
    async with httpx.AsyncClient(base_url=where.url, headers=headers, timeout=60, trust_env=False) as http:
        await measure_costs(where, http, asked, found)
    if asked.waiting:
        where.kill()
        await fill(where.database, finished=0, waiting=asked.waiting + asked.jobs)
        where.start()
    async with httpx.AsyncClient(base_url=where.url, headers=headers, timeout=60, trust_env=False) as http:
        await measure_load(where, http, asked, found)
    where.kill()
    found.add("restart_s", where.start())


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that is not below `share` of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure each round on a new database."""
    report = Report("server", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)
    found = Round()
    for number in range(rounds):
        if not json:
            print(f"bench server: {extra.database}, round {number + 1}", file=sys.stderr)
        with site(extra.database) as where:
            asyncio.run(_bounded(where, extra, found))
    submit_ms, placement_s = found.samples.pop("submit_ms"), found.samples.pop("placement_s")
    for name, values in found.samples.items():
        report.add(name, values, digits=3)
    for name, values, digits in (("submit", [one / 1e3 for one in submit_ms], 1), ("placement", placement_s, 1)):
        for share in (50, 95, 99):
            report.figures[f"{name}_p{share}_ms"] = round(1e3 * percentile(values, share / 100), digits)
    return report
