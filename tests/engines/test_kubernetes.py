"""Pilots on Kubernetes: an API server and a cluster of the tests' own (api_server.py, cluster_stand_in.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Site
from tests.engines.api_server import TOKEN, ApiServer
from tests.engines.cluster_stand_in import StandIn
from tests.engines.contract import ProvisionerContract, phases, request, wait_for
from tests.engines.kubelet import Kubelet
from tests.engines.run_over_engine import run_and_lose_a_node
from tests.support.waiting import until

from penstock.cluster.kubernetes.access import Access
from penstock.cluster.kubernetes.api import Api
from penstock.cluster.kubernetes.engine import Kubernetes
from penstock.cluster.kubernetes.manifests import ATTEMPTS, PodOptions, job
from penstock.cluster.provisioner import EngineAway, Phase
from penstock.errors import SpecError

OPTIONS = PodOptions("registry.example/penstock:1", "pilots", "kubernetes")
COLLECTIONS = ("/apis/batch/v1/namespaces/pilots/jobs", "/api/v1/namespaces/pilots/pods")


@pytest.fixture
def site() -> Iterator[tuple[ApiServer, Kubernetes]]:
    """A server, and an engine that follows it; the server ends first, so that no watch is waited for."""
    server = ApiServer()
    made = connect(server)
    with server:
        yield server, made
    made.close()


@pytest.fixture
def server(site: tuple[ApiServer, Kubernetes]) -> ApiServer:
    return site[0]


@pytest.fixture
def engine(site: tuple[ApiServer, Kubernetes], cluster: StandIn) -> Kubernetes:
    return site[1]


@pytest.fixture
def cluster(server: ApiServer) -> StandIn:
    return StandIn(server, {"node0": 2, "node1": 2, "node2": 2})


def connect(server: ApiServer, options: PodOptions = OPTIONS, token: str = TOKEN) -> Kubernetes:
    return Kubernetes(Api(Access(server.url, "pilots", lambda: token)), options)


class KubernetesAgents:
    """Nodes of the stand-in, which are lost."""

    capacity = 3

    def __init__(self, cluster: StandIn) -> None:
        self.cluster = cluster

    def lose_node_of(self, name: str) -> None:
        self.cluster.lose(self.cluster.pod(name)["spec"]["nodeName"])


@pytest.fixture
def agents(cluster: StandIn) -> KubernetesAgents:
    return KubernetesAgents(cluster)


class TestKubernetesKeepsTheContract(ProvisionerContract):
    """tests/engines/contract.py on Kubernetes."""

    UNKNOWN = "gang-unknown"


def detail(engine: Kubernetes, handle: str, name: str = "gang-0") -> str:
    return {pilot.name: pilot.detail for pilot in engine.poll(handle)}[name]


def says(engine: Kubernetes, handle: str, *parts: str) -> None:
    """Wait until the reason of gang-0 has these parts."""
    until(lambda: all(part in detail(engine, handle) for part in parts), f"{parts} of {detail(engine, handle)!r}")


def test_unschedulable_pod_has_the_schedulers_reason(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    cluster.nodes.clear()
    says(engine, engine.launch(request(tmp_path, "gang", 1)), "Unschedulable", "0/0 nodes are available")


def test_image_that_cannot_be_pulled_is_named(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    cluster.unpullable.add(OPTIONS.image)
    handle = engine.launch(request(tmp_path, "gang", 1))
    says(engine, handle, "ImagePullBackOff", OPTIONS.image)
    assert phases(engine, handle) == {"gang-0": Phase.PENDING}


def test_evicted_pod_is_replaced_and_costs_no_attempt(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    for _ in range(ATTEMPTS + 2):
        cluster.end("gang-0", 143, evicted="EvictionByEvictionAPI")
    wait_for(engine, handle, Phase.RUNNING)


def test_pilot_that_fails_again_and_again_has_ended(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    for _ in range(ATTEMPTS + 1):
        cluster.end("gang-0", 6)
    wait_for(engine, handle, Phase.ENDED)
    says(engine, handle, "Error with status 6 on node0")


def test_pilot_that_the_server_refuses_is_not_repeated(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 2))
    cluster.end("gang-0", 4)
    wait_for(engine, handle, Phase.ENDED, Phase.RUNNING)


def test_pending_pilot_that_is_cancelled_is_not_replaced(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    cluster.nodes.update({"node1": 0, "node2": 0})
    handle = engine.launch(request(tmp_path, "gang", 2))
    wait_for(engine, handle, Phase.RUNNING, Phase.PENDING)
    engine.cancel(handle, ["gang-1"])
    wait_for(engine, handle, Phase.RUNNING, Phase.ENDED)
    cluster.nodes["node1"] = 2
    cluster.end("gang-0")
    wait_for(engine, handle, Phase.ENDED, Phase.ENDED)
    assert not [pod for pod in cluster.store.of("pods") if pod["status"]["phase"] == "Running"]


def test_pilot_of_a_lost_node_does_not_come_back(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    cluster.lose("node0")
    wait_for(engine, handle, Phase.ENDED)
    says(engine, handle, "lost with its node on node0")
    cluster.nodes["node0"] = 2
    with cluster.store.lock:
        cluster.settle()  # its kubelet is back, and ends the pod
    wait_for(engine, handle, Phase.ENDED)


def test_suspended_job_waits_for_kueue(server: ApiServer, cluster: StandIn, tmp_path: Path) -> None:
    engine = connect(server, replace(OPTIONS, queue="team"))
    handle = engine.launch(request(tmp_path, "gang", 1))
    says(engine, handle, "Kueue", "'team'")
    cluster.admit(handle)
    wait_for(engine, handle, Phase.RUNNING)
    server.stop_watches()
    engine.close()


def test_secret_and_settings_go_with_their_job(engine: Kubernetes, cluster: StandIn, tmp_path: Path) -> None:
    asked = request(tmp_path, "gang", 1)
    handle = engine.launch(asked)
    assert cluster.store.get("secrets", handle)["stringData"] == {"join-token": asked.token}
    assert asked.token not in str([cluster.store.of("jobs"), cluster.store.of("configmaps"), cluster.store.of("pods")])
    engine.cancel(handle)
    assert not cluster.store.of("secrets") and not cluster.store.of("configmaps")


def test_launch_that_broke_off_is_completed(
    engine: Kubernetes, server: ApiServer, cluster: StandIn, tmp_path: Path
) -> None:
    asked = request(tmp_path, "gang", 1)
    server.refuse_at("POST", "secrets", 503)
    with pytest.raises(EngineAway, match="503"):
        engine.launch(asked)
    handle = engine.launch(asked)
    assert [job["metadata"]["name"] for job in cluster.store.of("jobs")] == [handle]
    assert cluster.store.get("configmaps", handle)


def test_expired_watch_begins_with_a_list_again(
    engine: Kubernetes, server: ApiServer, cluster: StandIn, tmp_path: Path
) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    wait_for(engine, handle, Phase.RUNNING)
    server.requests.clear()
    with server.store.lock:
        server.store.compact()  # 410 Gone
    until(lambda: {f"GET {path}" for path in COLLECTIONS} <= set(server.requests), "both are listed again")
    cluster.end("gang-0")
    wait_for(engine, handle, Phase.ENDED)


def test_polls_cost_no_requests(engine: Kubernetes, server: ApiServer, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    wait_for(engine, handle, Phase.RUNNING)
    until(lambda: sum("watch" in one for one in server.requests) == 2, "both collections are watched")
    server.requests.clear()
    for _ in range(20):
        engine.poll(handle)
    assert server.requests == []


def test_broken_watch_is_away_until_it_is_back(engine: Kubernetes, server: ApiServer, tmp_path: Path) -> None:
    handle = engine.launch(request(tmp_path, "gang", 1))
    wait_for(engine, handle, Phase.RUNNING)
    server.refuse_at("GET", "pods", 500)
    server.stop_watches()

    def is_away() -> bool:
        try:
            engine.poll(handle)
        except EngineAway:
            return not server.refused  # the list was refused as well
        return False

    until(is_away, "the engine is away")
    server.resume_watches()

    def is_back() -> bool:
        try:
            return phases(engine, handle) == {"gang-0": Phase.RUNNING}
        except EngineAway:
            return False

    until(is_back, "the engine is back")


def test_wrong_token_is_refused_with_its_reason(server: ApiServer, cluster: StandIn, tmp_path: Path) -> None:
    engine = connect(server, token="another")
    with pytest.raises(SpecError, match=r"401: .*Unauthorized"):
        engine.launch(request(tmp_path, "gang", 1))
    engine.close()


def test_server_that_is_not_there_is_away(tmp_path: Path) -> None:
    engine = Kubernetes(Api(Access("http://127.0.0.1:9", "pilots", lambda: TOKEN)), OPTIONS)
    with pytest.raises(EngineAway, match="cannot be reached"):
        engine.launch(request(tmp_path, "gang", 1))
    with pytest.raises(EngineAway, match="cannot be reached"):
        engine.poll("gang-1")
    engine.close()


def test_name_that_is_none_for_kubernetes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Gang_of_pods"):
        job(request(tmp_path, "Gang_of_pods", 1), "name", OPTIONS)


@pytest.mark.soak
def test_job_outlives_the_loss_of_a_kubernetes_node(
    quick_site: Site, server: ApiServer, cluster: StandIn, agents: KubernetesAgents, folder: Path, tmp_path: Path
) -> None:
    """The agents are real, as processes of this host; the cluster is the stand-in."""
    config = tmp_path / "kubeconfig"
    context = {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "pilots"}}
    known = {"clusters": [{"name": "c", "cluster": {"server": server.url}}]}
    users = [{"name": "u", "user": {"token": TOKEN}}]
    config.write_text(json.dumps({"current-context": "here", "contexts": [context], **known, "users": users}))
    quick_site.environ["KUBECONFIG"] = str(config)
    kubelet = Kubelet(cluster, tmp_path / "pods")
    try:
        run_and_lose_a_node(quick_site, folder, "kubernetes", agents, "--image", "example/penstock")
    finally:
        kubelet.close()
