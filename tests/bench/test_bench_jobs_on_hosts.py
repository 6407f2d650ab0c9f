"""Jobs of several servers and trainers, on addresses of one host: they learn what one process learns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.peers.agreement import check_movements
from bench.peers.cluster import Cluster, Host
from bench.peers.contender import OURS
from bench.peers.race import check_losses
from bench.peers.remote import Remote

from bench import workloads
from penstock.distributed.ports import free_ports


@pytest.mark.soak
@pytest.mark.timeout(400)  # five processes import torch
@pytest.mark.parametrize("key", ["penstock_hosts", "torch_rpc_hosts"])
def test_two_servers_and_two_trainers_learn_as_one_process(tmp_path: Path, key: str) -> None:
    kept = tmp_path / "small.npz"
    workloads.criteo(num_batches=4, batch_size=16, rows=101).save(kept)
    hosts = tuple(Host((), f"127.0.0.{number}") for number in range(1, 5))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    cluster = Cluster(key, hosts[:2], hosts[2:], True, free_ports("127.0.0.1", 1)[0], cores, "lo")
    cluster.save(tmp_path / "cluster.json")
    job = Remote(key, workload=kept, folder=tmp_path, cores=1, column="installed", cluster=tmp_path / "cluster.json")
    alone = Remote("torch_eager", workload=kept, folder=tmp_path, cores=1, column="installed")
    try:
        for one in (job, alone):
            one.wait_ready()
            one.run(6)
            one.check()
        check_losses({"job": job.losses, "alone": alone.losses}, 1e-4)  # float32 sums of 16 rows in another order
        check_movements({OURS: alone.movements, key: job.movements}, 0.01, 6)
        assert 0.0 < job.exposed_shares[0] < 1.0
    finally:
        job.close()
        alone.close()
