"""The original parameter server of paddlepaddle 2.6.2 (brpc) on several hosts, sync or asynchronous.

Records and feeds as `paddle_brpc` does, and as there its servers make the table's rows by themselves, so what it learns
is not compared. Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from bench.peers.cluster import Cluster, OtherRanks, Served, mean_loss, of, share
from bench.peers.contender import Options
from bench.peers.paddle_brpc import FleetTrainer, recorded
from bench.workloads.workload import Workload


class HostsTrainer(FleetTrainer):
    """One trainer. Rank 0 owns the other processes."""

    def __init__(self, options: Options, cluster: Cluster) -> None:
        self._others = OtherRanks(options, cluster) if options.rank == 0 else None
        os.environ |= _environment(cluster, "TRAINER", options.rank)
        super().__init__(Workload.load(options.workload), asynchronous=not cluster.sync)
        self._feeds = [share(feed, options.rank, len(cluster.trainers)) for feed in self._feeds]

    def run(self, num_steps: int) -> float:
        """Train on every trainer; return the last loss, of the whole batch."""
        if self._others is not None:
            self._others.pass_on({"run": num_steps})
        return mean_loss(super().run(num_steps), self._others)

    def close(self) -> None:
        """End the servers, which would go on without trainers."""
        if self._others is not None:
            self._others.end_trainers()
        super().close()
        if self._others is not None:
            self._others.kill_servers()
            self._others.wait()


def _environment(cluster: Cluster, role: str, number: int) -> dict[str, str]:
    host = (cluster.trainers if role == "TRAINER" else cluster.servers)[number]
    port = cluster.port + (1 if role == "TRAINER" else 0)
    return {
        "TRAINING_ROLE": role,
        "POD_IP": host.address,
        "PADDLE_PORT": str(port),
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(cluster.server_endpoints),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"{one.address}:{cluster.port + 1}" for one in cluster.trainers),
        "PADDLE_TRAINERS_NUM": str(len(cluster.trainers)),
        "PADDLE_TRAINER_ID": str(number if role == "TRAINER" else 0),
        "CPU_NUM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }


def make(options: Options) -> HostsTrainer | Served:
    """Build one trainer, or serve; rank 0 starts the others."""
    cluster = of(options)
    if options.rank < len(cluster.trainers):
        return HostsTrainer(options, cluster)
    os.environ |= _environment(cluster, "PSERVER", options.rank - len(cluster.trainers))
    fleet, _, _, _ = recorded(Workload.load(options.workload), asynchronous=not cluster.sync)
    fleet.init_server()
    fleet.run_server()
    return Served()
