"""Pilots on a real Ray of the tests' own, on this machine.

`make test-all` runs a gang of two on a head and one raylet. `make soak` has the whole contract, agents that cannot be
started, killed actors and raylets, lost nodes and a job, on a head and three raylets.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray  # its index has wheels for every Python that Penstock supports
import ray.util
from tests.cli.conftest import Site
from tests.engines.contract import ProvisionerContract, request, wait_for
from tests.engines.ray_cluster import RayCluster
from tests.engines.run_over_engine import run_and_lose_a_node
from tests.support.waiting import until

from penstock.cluster.provisioner import Phase
from penstock.cluster.ray.engine import Options, Ray
from penstock.process import proc

NODES = 3
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(NODES) as made:
        yield made


@pytest.fixture
def engine(cluster: RayCluster, tmp_path: Path) -> Iterator[Ray]:
    made = Ray(Options(cluster.address, pilot_dir=str(tmp_path)))
    yield made
    for handle in [name for name in made.names() if name.count(".") == 1]:
        made.cancel(handle)
    until(lambda: not groups(), "every placement group is removed")
    until(lambda: not agents_in(tmp_path), "every agent has ended")
    made.close()


def groups() -> list[str]:
    return [one["name"] for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]


def agents_in(folder: Path) -> dict[int, str]:
    """Return the agents whose state is below a folder: pid to name."""
    found = {}
    for item in proc.every():
        try:
            argv = Path(f"/proc/{item.pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if argv[1:3] == ["-m", "penstock_worker"] and str(folder) in argv[-2]:
            found[item.pid] = argv[argv.index("--name") + 1]
    return found


class RayAgents:
    """Nodes of Ray, which are lost; others are added for them."""

    capacity = NODES

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.lost = 0

    def node_of(self, name: str) -> int:
        """Return the node on which the agent of a pilot runs."""

        def runs(index: int) -> bool:
            return any(
                b"\0--name\0" + name.encode() + b"\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
                for pid in proc.with_environment(f"NODE_OF_TEST={self.cluster.folder}/node{index}")
            )

        (found,) = [index for index in range(1, self.cluster.num_nodes + self.lost + 1) if runs(index)]
        return found

    def lose_node_of(self, name: str) -> None:
        until(lambda: self._has(name), f"the agent of {name} runs", limit_s=180.0)
        self.cluster.crash_node(self.node_of(name))
        self.lost += 1

    def _has(self, name: str) -> bool:
        try:
            return self.node_of(name) > 0
        except (ValueError, OSError):
            return False


@pytest.fixture
def agents(cluster: RayCluster) -> Iterator[RayAgents]:
    made = RayAgents(cluster)
    yield made
    for _ in range(made.lost):
        cluster.add_node()
    cluster.num_nodes += made.lost


class TestRayOfOneNode:
    """A head and a raylet with room for two pilots."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[RayCluster]:
        with RayCluster(1, cpus=4) as made:
            yield made

    def test_agents_of_a_gang_run_until_they_are_cancelled(self, engine: Ray, tmp_path: Path) -> None:
        handle = engine.launch(request(tmp_path, "gang", 2))
        until(lambda: sorted(agents_in(tmp_path).values()) == ["gang-0", "gang-1"], "both agents run", limit_s=180.0)
        wait_for(engine, handle, Phase.RUNNING, Phase.RUNNING)
        engine.cancel(handle)
        wait_for(engine, handle, Phase.ENDED, Phase.ENDED)


@pytest.mark.soak
class TestRayKeepsTheContract(ProvisionerContract):
    """tests/engines/contract.py on Ray."""

    UNKNOWN = "gang.1x00000000"


def worker_of(agent: int) -> int:
    """Return the Ray worker above an agent and its tether."""
    found = proc.stat(agent)
    above = found and proc.stat(found.parent)
    assert above is not None
    return above.parent


@pytest.mark.soak
def test_killed_actor_takes_its_agent_along_and_starts_again(engine: Ray, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 2))
    until(lambda: len(agents_in(tmp_path)) == 2, "both agents run", limit_s=180.0)
    (first, name), (other, _) = agents_in(tmp_path).items()
    os.kill(worker_of(first), signal.SIGKILL)
    until(lambda: first not in agents_in(tmp_path), "the agent ends with its actor")
    until(
        lambda: name in [one for pid, one in agents_in(tmp_path).items() if pid != other],
        "it is started again",
        limit_s=180.0,
    )
    wait_for(engine, handle, Phase.RUNNING, Phase.RUNNING)
    assert other in agents_in(tmp_path)


@pytest.mark.soak
def test_pilot_whose_agent_cannot_be_started_ends(engine: Ray, cluster: RayCluster, tmp_path: Path) -> None:
    options = Options(cluster.address, python="/nowhere/python", pilot_dir=str(tmp_path))
    engine.close()  # a process is connected once
    with closing(Ray(options)) as nowhere:
        handle = nowhere.launch(request(tmp_path, "gang", 1))
        wait_for(nowhere, handle, Phase.ENDED)
        (pilot,) = nowhere.poll(handle)
    assert pilot.detail == "its agent cannot be started: [Errno 2] No such file or directory: '/nowhere/python'"
    assert not list(tmp_path.glob("penstock-gang*"))


@pytest.mark.soak
def test_killed_raylet_ends_its_agents_in_order(
    engine: Ray, cluster: RayCluster, agents: RayAgents, tmp_path: Path
) -> None:
    handle = engine.launch(request(tmp_path, "gang", 2))
    until(lambda: len(agents_in(tmp_path)) == 2, "both agents run", limit_s=180.0)
    (first, name), _ = agents_in(tmp_path).items()
    cluster.kill_raylet(agents.node_of(name))
    agents.lost += 1
    until(lambda: first not in agents_in(tmp_path), "the agent ends with its raylet")
    until(lambda: name in agents_in(tmp_path).values(), "it is started again on another node", limit_s=180.0)
    wait_for(engine, handle, Phase.RUNNING, Phase.RUNNING)


@pytest.mark.soak
def test_job_outlives_the_loss_of_a_ray_node(
    quick_site: Site, cluster: RayCluster, engine: Ray, agents: RayAgents, folder: Path
) -> None:
    options = ("--address", cluster.address, "--pilot-dir", str(folder.parent))
    print(*run_and_lose_a_node(quick_site, folder, "ray", agents, *options), sep="\n")
