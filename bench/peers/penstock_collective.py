"""Penstock's collective mode as a contender: one trainer a core, one replica each, gradients through shared memory.

Rank 0 is the process that the parent talks to. It starts the others as it was started, and passes every command on, as
`torch_distributed.py` does. Every rank takes an equal share of each batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from bench.models import programs
from bench.peers.contender import COLLECTIVE, Options, fetches
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Workload
from penstock.distributed import collective
from penstock.distributed.ports import free_ports

ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"


class CollectiveTrainer:
    """One rank. Rank 0 owns the other processes."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)
        if options.rank == 0:
            os.environ[ENDPOINTS] = ",".join(f"127.0.0.1:{p}" for p in free_ports("127.0.0.1", options.cores))
        os.environ.update(CPU_NUM="1", OMP_NUM_THREADS="1", PADDLE_TRAINER_ID=str(options.rank))
        self._others = [_start(options, rank) for rank in range(1, options.cores)] if options.rank == 0 else []
        self._workload = workload = Workload.load(options.workload)
        build = programs.strategy("all_reduce")
        build.num_trainers, build.trainer_id = options.cores, options.rank
        build.trainers_endpoints = os.environ[ENDPOINTS].split(",")
        self.executor, self._loss, feeds = programs.trainer(workload, build=build)
        self._feeds = [_share(feed, options) for feed in feeds]
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train on every rank; return this one's last loss."""
        self._pass_on({"run": num_steps})
        loss = 0.0
        for step in range(num_steps):
            wanted = [self._loss] if fetches(step, num_steps) else []
            fetched = self.executor.run(fetch_list=wanted, feed=self._feeds[self._next % len(self._feeds)])
            self._next += 1
            if wanted:
                loss = float(fetched[0].mean())
        return loss

    def check(self) -> None:
        """Raise RuntimeError if a parameter differs from rank 0's to the bit."""
        self._pass_on({"check": True})
        core, group = self.executor.core, collective.this_process.group
        assert group is not None
        for parameter in sorted(core.program.parameters(), key=lambda p: p.name):
            mine = core.memory.scope.find(parameter.name)
            first = mine.clone()
            group.broadcast([first])
            if not torch.equal(first, mine):
                raise RuntimeError(f"parameter {parameter.name} differs between ranks: no fair race")

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved on this rank; `check` sees to the others."""
        return movements(self._workload, programs.trained(self._workload, self.executor.core.memory.scope))

    def close(self) -> None:
        """End the other ranks; all leave together, at the end of their processes."""
        for other in self._others:
            assert other.stdin is not None
            other.stdin.close()

    def _pass_on(self, command: dict[str, Any]) -> None:
        for other in self._others:
            assert other.stdin is not None
            other.stdin.write(json.dumps(command).encode() + b"\n")
            other.stdin.flush()


def _start(options: Options, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.peers.serve", COLLECTIVE, "--workload", str(options.workload)]
    command += ["--folder", str(options.folder), "--cores", str(options.cores), "--rank", str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def _share(feed: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Cut out the rows of this rank; all ranks have equally many."""
    rows = len(next(iter(feed.values()))) // options.cores
    return {name: values[options.rank * rows : (options.rank + 1) * rows] for name, values in feed.items()}


def make(options: Options) -> CollectiveTrainer:
    """Build one rank; rank 0 starts the others."""
    return CollectiveTrainer(options)
