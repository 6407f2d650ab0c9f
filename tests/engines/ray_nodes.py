"""Starts the nodes of a Ray of the tests, and one more at each line of its input: `python -m tests.engines.ray_nodes`.

A process of its own: the nodes' processes are its children, and what Ray leaves in a process stays out of the tests'.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.cluster_utils import Cluster
from tests.engines import ray_cluster


def main(folder: Path, num_nodes: int, cpus: int) -> None:
    """Print the address when all nodes are there, and a line for each further one."""
    cluster = Cluster(shutdown_at_exit=False)
    for index in range(num_nodes + 1):
        ray_cluster.start(cluster, index, folder, cpus)
    print(cluster.address, flush=True)
    for index, _ in enumerate(sys.stdin, num_nodes + 1):
        ray_cluster.start(cluster, index, folder, cpus)
        print(index, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
