"""Version skew: server, agent, command and scripts of an earlier version beside today's.

`tests/golden/earlier.tar.xz` has the earlier ones, from before stacks, full recordings, labels of nodes and limits of
replicas were messages (`python -m tools.earlier`). What is tolerated: docs/support.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until
from tools.chaos.counting import SERIES
from tools.chaos.history import Limits
from tools.chaos.invariants import check
from tools.chaos.parts import Part
from tools.chaos.world import World, import_from
from tools.earlier import ARCHIVE, ROOT

from penstock.client import Conflict

LIMITS = Limits(ttl_s=3.0, grace_s=30.0, stop_s=6.0, slack_s=25.0)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the earlier version."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder)
    messages = (folder / "core" / "penstock" / "protocol" / "agent.py").read_text(encoding="utf-8")
    assert "takes_stacks" not in messages and "labels" not in messages
    return folder


@pytest.fixture(scope="module")
def upgraded(earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str]]:
    """A server that was upgraded in the midst of a job, with its earlier agent; and the job."""
    sources = {"server": earlier, "node0": earlier}
    with World(tmp_path_factory.mktemp("world"), num_nodes=1, limits=LIMITS, sources=sources) as world:
        job = world.submit("upgraded", lines=60, env=import_from(earlier))
        until(lambda: log_of(world, job).count("\n") >= 5, "the job runs")
        world.server.close()
        del world.sources["server"]
        world.start_server()
        yield world, job


def log_of(world: World, job: str) -> str:
    with world.client() as client:
        return "".join(client.logs(job, one["id"])["text"] for one in client.job(job)["replicas"])


def lines(count: int) -> str:
    return "".join(f"{number}\n" for number in range(count))


def steps_of(world: World, job: str) -> list[int]:
    """Return the steps of the series that a counting job logs, as the API has them."""
    with world.client() as client:
        name = SERIES + client.job(job)["replicas"][0]["id"]
        return [int(step) for step in client.metrics(job, name).get(name, {"step": []})["step"]]


def command(world: World, source: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock`, of the earlier version or of today's."""
    token = (world.server_dir / "admin.token").read_text().strip()
    environ = {**world.environ("command"), "PENSTOCK_URL": world.url, "PENSTOCK_TOKEN": token}
    environ |= import_from(source) if source is not None else {}
    argv = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_job_of_earlier_agent_survives_upgrade(upgraded: tuple[World, str]) -> None:
    world, job = upgraded
    until(lambda: world.is_over(job), "the job ends")
    until(lambda: not broken(world, "I8"), "its log and its series are whole")
    assert broken(world) == []
    assert world.job(job)["state"] == "SUCCEEDED" and world.job(job)["attempt"] == 1
    assert log_of(world, job) == lines(60)
    assert steps_of(world, job) == list(range(60))


def broken(world: World, *only: str) -> list[str]:
    return [str(one) for one in check(world.history(is_final=True)) if not only or one.invariant in only]


def test_earlier_agent_runs_jobs_of_upgraded_server(upgraded: tuple[World, str]) -> None:
    world, _ = upgraded
    assert_job_is_whole(world, ROOT)


def test_earlier_command_works_with_upgraded_server(upgraded: tuple[World, str], earlier: Path) -> None:
    world, _ = upgraded
    path = world.folder / "job.json"
    spec = {"name": "by-earlier", "entrypoint": ["python", "-c", "print('hello')"], "mode": "command"}
    path.write_text(json.dumps(spec), encoding="utf-8")
    done = command(world, earlier, "submit", str(path), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "SUCCEEDED"
    assert command(world, earlier, "logs", "-f", "by-earlier").stdout == "hello\n"


def test_what_an_earlier_agent_cannot_do_is_refused(upgraded: tuple[World, str]) -> None:
    world, _ = upgraded
    job = world.submit("asked", lines=1000, pause_s=0.5)
    until(lambda: log_of(world, job), "the job runs")
    with world.client() as client:
        with pytest.raises(Conflict, match="takes no stacks"):
            client.stacks(job, client.job(job)["replicas"][0]["id"])
        with pytest.raises(Conflict, match="older"):
            client.record(job, 1)
        client.cancel(job)
    until(lambda: world.is_over(job), "the job ends")


def assert_job_is_whole(world: World, script: Path) -> None:
    """A job ends well, with all lines of its log and all points of its series. `script`: what its process imports."""
    job = world.submit("whole", lines=15, pause_s=0.02, env=import_from(script))
    until(lambda: world.is_over(job), "the job ends")
    assert world.job(job)["state"] == "SUCCEEDED", world.job(job)["why"]
    until(lambda: log_of(world, job) == lines(15), "its log is whole")
    until(lambda: steps_of(world, job) == list(range(15)), "its series is whole")


@pytest.fixture(scope="module")
def behind(earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An earlier server with an agent of today."""
    with World(tmp_path_factory.mktemp("behind"), num_nodes=1, limits=LIMITS, sources={"server": earlier}) as world:
        yield world


def test_agent_runs_jobs_of_earlier_server(behind: World, earlier: Path) -> None:
    assert_job_is_whole(behind, earlier)


def test_command_works_with_earlier_server(behind: World) -> None:
    path = behind.folder / "job.json"
    spec = {"name": "by-current", "entrypoint": ["python", "-c", "print('hello')"], "mode": "command"}
    path.write_text(json.dumps(spec), encoding="utf-8")
    done = command(behind, None, "submit", str(path), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    assert command(behind, None, "logs", "-f", "by-current").stdout == "hello\n"


def test_pilot_takes_one_job_of_earlier_server(behind: World) -> None:
    with behind.client() as client:
        client.want_node(behind.node_ids[0], "cordon")
        token = client.join_token()["token"]
    given = ["--url", behind.url, "--join-token", token, "--name", "pilot", "--once"]
    pilot = Part([], behind.environ("pilot"), behind.folder / "pilot.err")
    pilot.start(
        [sys.executable, "-m", "penstock_worker", "--state-dir", str(behind.folder / "pilot" / "state"), *given]
    )
    try:
        job = behind.submit("for-the-pilot", lines=3, pause_s=0.02)
        until(lambda: behind.is_over(job), "the job ends")
        assert pilot.wait(30.0) == 0, pilot.errors()
        assert log_of(behind, job) == lines(3)
        assert steps_of(behind, job) == list(range(3))
    finally:
        pilot.close()
        behind.persist(lambda client: client.want_node(behind.node_ids[0], "uncordon"))
