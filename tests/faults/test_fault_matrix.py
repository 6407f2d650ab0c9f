"""The fault matrix: faults x phases of a job, on a real server, a real agent and real processes (docs/faults.md).

After each cell the job ends as it should, its log is whole, and the invariants I1 to I12 hold over all that happened in
the cell's world. A few cells are part of every run of the tests; the others are long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults import cells
from tests.faults.cells import PHASES, Bed
from tests.server.postgres_cluster import cluster
from tests.support.disks import small_disk
from tools.chaos.history import Limits
from tools.chaos.world import World
from tools.hosts.namespaces import Namespaces

LIMITS = Limits(ttl_s=3.0, grace_s=9.0, stop_s=6.0, slack_s=25.0)
CHAOS: dict[str, tuple[str, float]] = {
    "agent-killed-0s": ("agent killed", 0.0),
    "agent-killed-20s": ("agent killed", 20.0),
    "agent-killed-60s": ("agent killed", 60.0),
    "server-killed-0s": ("server killed", 0.0),
    "server-killed-20s": ("server killed", 20.0),
    "server-killed-60s": ("server killed", 60.0),
    "agent-stopped-20s": ("agent stopped", 20.0),
    "server-stopped-20s": ("server stopped", 20.0),
}
OF_PROCESSES = {
    "guard-killed": "guard killed",
    "replica-killed": "replica killed",
    "replica-stopped": "replica stopped",
}
CHECKPOINTED = {
    "agent-killed-0s": ("agent killed", 0.0),
    "agent-killed-20s": ("agent killed", 20.0),
    "server-killed-20s": ("server killed", 20.0),
    "guard-killed": ("guard killed", 1.0),
    "replica-killed": ("replica killed", 1.0),
}
OF_NETWORK = {"partition-20s": "partition", "half-open-in-20s": "deafened", "half-open-out-20s": "silenced"}
QUICK = {("agent-killed-0s", "running"), ("server-killed-0s", "stopping"), ("guard-killed", "running")}


def matrix(faults: Any, phases: Any = PHASES) -> list[Any]:
    """Return the cells of some faults; those that are not quick are long tests."""
    pairs = [(fault, phase) for fault in faults for phase in phases]
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.soak, id="-".join(pair)) for pair in pairs]


def play(bed: Bed, phase: str, fault: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
    """Play one cell. `fault` gets the job."""
    bed.node_is_back()
    job = bed.bring(phase)
    with fault(job):
        pass
    bed.release(phase)
    bed.node_is_back()
    bed.ends_well(job, phase)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """A world on the loopback that the cells share, one after another."""
    with World(tmp_path_factory.mktemp("world"), num_nodes=1, limits=LIMITS) as world:
        yield Bed(world)


@pytest.mark.parametrize(("fault", "phase"), matrix(CHAOS))
def test_agent_or_server_fails(bed: Bed, fault: str, phase: str) -> None:
    play(bed, phase, lambda _: cells.of_chaos(bed, *CHAOS[fault]))


@pytest.mark.smoke
@pytest.mark.parametrize(("fault", "phase"), matrix(OF_PROCESSES, ["running", "stopping"]))
def test_process_fails(bed: Bed, fault: str, phase: str) -> None:
    play(bed, phase, lambda _: cells.of_chaos(bed, OF_PROCESSES[fault], 1.0))


@pytest.mark.parametrize(("fault", "phase"), matrix(["lost-request", "lost-response"], ["queued", "running"]))
def test_request_is_lost(bed: Bed, fault: str, phase: str) -> None:
    play(bed, phase, lambda _: cells.lost(bed, "request" if fault == "lost-request" else "answer"))


@pytest.mark.parametrize(("fault", "phase"), matrix(["duplicate-join"], ["queued", "running"]))
def test_node_joins_twice(bed: Bed, fault: str, phase: str) -> None:
    assert fault
    play(bed, phase, lambda _: cells.duplicate_join(bed))


@pytest.mark.parametrize(("fault", "phase"), matrix(["cloned-identity"], PHASES))
def test_identity_is_cloned(bed: Bed, fault: str, phase: str) -> None:
    assert fault
    play(bed, phase, lambda _: cells.cloned_identity(bed, 5.0))


@pytest.mark.parametrize(("fault", "phase"), matrix(["stale-epoch"], ["running", "stopping"]))
def test_epoch_is_stale(bed: Bed, fault: str, phase: str) -> None:
    assert fault
    play(bed, phase, lambda job: cells.stale_epoch(bed, job))


@pytest.mark.soak
@pytest.mark.parametrize("fault", CHECKPOINTED)
def test_checkpoints_survive(bed: Bed, fault: str) -> None:
    """I7: what was committed is whole, and an attempt goes on from the newest."""
    bed.node_is_back()
    job = bed.bring_checkpointing()
    with cells.of_chaos(bed, *CHECKPOINTED[fault]):
        pass
    bed.node_is_back()
    bed.ends_well(job, "running")
    seen = [one for one in bed.world.history(is_final=True).checkpoints if one.job_id == job]
    assert max(one.step for one in seen) == 40
    assert any(one.is_restored for one in seen) is (bed.world.job(job)["attempt"] > 1)
    assert bed.world.job(job)["attempt"] > 1 or fault in ("agent-killed-0s", "server-killed-20s")


@pytest.mark.soak
@pytest.mark.parametrize("fault", OF_NETWORK)
@pytest.mark.parametrize("phase", PHASES)
def test_network_fails(tmp_path: Path, fault: str, phase: str) -> None:
    with Namespaces(2) as network, World(tmp_path / "world", num_nodes=1, limits=LIMITS, network=network) as world:
        bed = Bed(world)
        play(bed, phase, lambda _: cells.of_chaos(bed, OF_NETWORK[fault], 20.0))


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
def test_database_is_down(tmp_path: Path, phase: str) -> None:
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(cluster())
        world = World(tmp_path / "world", num_nodes=1, limits=LIMITS, database_url=postgres.url)
        bed = Bed(stack.enter_context(world), postgres)
        play(bed, phase, lambda _: cells.database_down(bed, 30.0))


@pytest.mark.soak
@pytest.mark.parametrize("whose", ["node0", "server"])
@pytest.mark.parametrize("phase", ["queued", "running", "stopping"])
def test_disk_is_full(tmp_path: Path, whose: str, phase: str) -> None:
    state = tmp_path / "world" / whose / "state"
    with small_disk(state, "48m"), World(tmp_path / "world", num_nodes=1, limits=LIMITS) as world:
        bed = Bed(world)
        play(bed, phase, lambda _: cells.disk_full(bed, state, 8.0))
