"""Pilots on a real Slurm: slurmctld and two slurmd of the tests' own, on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Site
from tests.engines.contract import ProvisionerContract, phases, request, wait_for
from tests.engines.run_over_engine import run_and_lose_a_node
from tests.engines.slurm_cluster import SlurmCluster
from tests.support.waiting import until

from penstock.cluster.provisioner import Phase
from penstock.cluster.slurm import Slurm, held_back, read_kill_wait

NODES = 3
KILL_WAIT_S = 5.0  # as slurm.conf has it


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "slurm", NODES) as made:
        yield made


@pytest.fixture
def engine(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Slurm]:
    until(lambda: cluster.states() == ["idle"] * NODES, "all nodes of Slurm are idle")
    made = Slurm(sys.executable, tmp_path / "logs", pilot_dir=str(tmp_path), environ=cluster.environ)
    yield made
    cluster.run("scancel", "--me")
    until(lambda: not cluster.run("squeue", "-h", "--me"), "nothing is left in the queue")


class SlurmAgents:
    """Nodes of Slurm, which are lost and come back."""

    capacity = NODES

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.lost: list[int] = []

    def lose_node_of(self, name: str) -> None:
        (node,) = [
            found.split("|")[1]
            for found in self.cluster.run("squeue", "-h", "-r", "-o", "%j-%K|%N").splitlines()
            if found.startswith(f"{name}|")
        ]
        self.lost.append(int(node.removeprefix("node")))
        self.cluster.crash_node(self.lost[-1])

    def back(self) -> None:
        for index in self.lost:
            self.cluster.restore_node(index)


@pytest.fixture
def agents(cluster: SlurmCluster) -> Iterator[SlurmAgents]:
    made = SlurmAgents(cluster)
    yield made
    made.back()


class TestSlurmKeepsTheContract(ProvisionerContract):
    """tests/engines/contract.py on Slurm."""


@pytest.mark.soak
def test_requeued_task_starts_again_under_its_name(cluster: SlurmCluster, engine: Slurm, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    wait_for(engine, handle, Phase.RUNNING)
    until(lambda: list(tmp_path.glob(f"penstock-{handle}-0-*")), "it has made its folder")
    cluster.run("scontrol", "requeue", f"{handle}_0")
    until(
        lambda: phases(engine, handle) and len(list(tmp_path.glob(f"penstock-{handle}-0-*"))) >= 2,
        "each start has a folder of its own",
    )
    wait_for(engine, handle, Phase.RUNNING)


def test_nodes_set_down_end_their_pilots_on_them(cluster: SlurmCluster, engine: Slurm, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 2))
    wait_for(engine, handle, Phase.RUNNING, Phase.RUNNING)
    index, (_, node) = next(iter(cluster.tasks(handle).items()))
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    down = time.monotonic()
    until(lambda: cluster.tasks(handle)[index] not in (("RUNNING", node), ("COMPLETING", node)))
    until(lambda: phases(engine, handle)[f"gang-{index}"] is Phase.RUNNING, "it was requeued")
    # The node may have registered again, and have it: not before it is rid of the first, or Slurm drains the node.
    assert time.monotonic() - down >= KILL_WAIT_S
    assert not {"drain", "drng"} & set(cluster.states())
    cluster.resume(node)


def test_a_held_task_is_told_from_others_that_wait() -> None:
    held = "gang|1|PENDING|BeginTime||1795784300"
    assert list(held_back(held)) == [("1", 1795784300.0)]
    others = ("gang|1|PENDING|None||N/A", "gang|1|PENDING|Resources||1795784300", "gang|1|RUNNING|None|n|1795784300")
    assert not [found for line in others for found in held_back(line)]
    assert read_kill_wait("KeepAliveTime           = SYSTEM_DEFAULT\nKillWait                = 30 sec\n") == 30.0


def preempted_by(
    site: Site, cluster: SlurmCluster, engine: Slurm, folder: Path, signal: Callable[[str], object]
) -> None:
    """Run a job on a pilot, let Slurm signal the pilot, and see that the job was preempted in good order."""
    site.up("--no-agent")
    with site.client as client:
        asked = replace(request(folder, "gang", 1), url=client.url)
        asked.token_file.write_text(client.join_token(reusable=True)["token"])
    code = "import time; print('up', flush=True); time.sleep(600)"
    job = site.submit(site.job("job", code, trainers={"memory": "64MiB"}))
    handle = engine.launch(asked)
    until(lambda: site.log(job) == "up\n", "the job runs on the pilot")
    signal(handle)
    until(lambda: site.look(job)["reason"] == "preempted", "the job was preempted", limit_s=150.0)
    assert site.look(job)["restarts"] == 0
    wait_for(engine, handle, Phase.ENDED)
    (ended,) = engine.poll(handle)
    assert ended.detail.startswith("COMPLETED"), "the pilot ended by itself"
    site.run("cancel", job)


@pytest.mark.soak
def test_signal_of_slurm_reaches_the_agent_as_preemption(
    quick_site: Site, cluster: SlurmCluster, engine: Slurm, tmp_path: Path
) -> None:
    preempted_by(
        quick_site, cluster, engine, tmp_path, lambda handle: cluster.run("scancel", "--batch", "-s", "TERM", handle)
    )


@pytest.mark.soak
def test_slurm_warns_a_pilot_ahead_of_its_time_limit(
    quick_site: Site, cluster: SlurmCluster, engine: Slurm, tmp_path: Path
) -> None:
    """The limit is a minute, the shortest there is, and Slurm looks every half of one: SIGTERM comes within it."""
    limited = replace(engine, options=("--time=1",), signal_s=55.0)
    preempted_by(quick_site, cluster, limited, tmp_path, lambda handle: None)


@pytest.mark.soak
def test_job_outlives_the_loss_of_a_slurm_node(
    quick_site: Site, cluster: SlurmCluster, engine: Slurm, agents: SlurmAgents, folder: Path
) -> None:
    quick_site.environ.update({name: cluster.environ[name] for name in ("SLURM_CONF", "SLURM_OF_TEST")})
    run_and_lose_a_node(quick_site, folder, "slurm", agents, "--pilot-dir", str(folder.parent))
