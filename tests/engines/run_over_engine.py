"""A job of 2 trainers and 2 servers on pilots of an engine, one of whose nodes is lost: with the real command."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from tests.cli.conftest import Site
from tests.engines.contract import Agents
from tests.support.waiting import until

SCRIPT = Path(__file__).with_name("training.py")


def job_file(folder: Path) -> Path:
    """Write the job; its processes take a CPU each, so that two pilots of two CPUs hold it."""
    each = {"count": 2, "cpus": 1, "memory": "512MiB"}
    spec = {
        "name": "regression", "mode": "pserver", "entrypoint": ["python", str(SCRIPT), str(folder)], "trainers": each,
        "pservers": each, "restart": {"max_restarts": 2, "on": ["infra"]}, "stop_grace_s": 2,
        "env": {"OMP_NUM_THREADS": "1", "PENSTOCK_PS_DEADLINE_S": "60"},
    }  # fmt: skip
    path = folder / "job.json"
    path.write_text(json.dumps(spec))
    return path


def trained(folder: Path, attempts: int) -> bool:
    """Whether both trainers of a further attempt have trained."""
    epochs = {path.name.partition("-")[0] for path in folder.glob("*-trainer-*")}
    return sum(len(list(folder.glob(f"{epoch}-trainer-*"))) == 2 for epoch in epochs) >= attempts


def trains(site: Site, job: str, folder: Path, attempts: int) -> bool:
    """The same; fails as soon as the job has failed."""
    found = site.look(job)
    assert found["state"] not in ("FAILED", "CANCELLED"), found["why"]
    return trained(folder, attempts)


def run_and_lose_a_node(site: Site, folder: Path, engine: str, agents: Agents, *options: str) -> list[str]:
    """Run the job, lose a node once it trains, and see it end well.

    Returns what `penstock nodes` and `penstock jobs` have shown on the way.
    """
    site.up("--no-agent")
    shape = ("--cpus", "2", "--memory", "1200MiB", "--max", "3", "--idle", "1", "--every", "0.5", "--ttl", "600")
    keeper = site.start("penstock.cli", "cluster", engine, *shape, *options)
    job = site.submit(job_file(folder))
    shown = []
    until(lambda: site.look(job)["state"] in ("STARTING", "RUNNING"), "the job is placed on pilots")
    until(lambda: trains(site, job, folder, 1), "both trainers train")
    shown.append(_lists(site))
    assert "serves jobs on 2 of 2 CPUs" in shown[-1]
    first = site.look(job)
    agents.lose_node_of(f"{engine}-0-0")
    until(lambda: site.look(job)["attempt"] == 2, "the job has another attempt")
    shown.append(_lists(site))
    until(lambda: trains(site, job, folder, 2), "both trainers train again")
    (folder / "go").touch()
    until(lambda: site.look(job)["state"] == "SUCCEEDED", "the job ends")
    assert "loss fell from" in site.log(job)
    assert site.look(job)["id"] == first["id"]
    until(lambda: site.json("nodes") and not _pilots(site), "idle pilots are drained, and cancelled")
    keeper.terminate()
    assert keeper.wait(20) == 0
    assert site.run("cluster", engine, "--down", *options).returncode == 0
    shown.append(_lists(site))
    return shown


def _lists(site: Site) -> str:
    return f"{datetime.now(UTC):%H:%M:%S}\n{site.run('nodes').stdout}{site.run('jobs').stdout}"


def _pilots(site: Site) -> list[str]:
    with site.client as client:
        return [pilot["reason"] for pilot in client.pilots()]
