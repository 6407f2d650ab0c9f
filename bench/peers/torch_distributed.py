"""DistributedDataParallel over Gloo, one process a core with one thread each. `mode`: "ddp" or "zero1".

Every rank takes an equal share of each batch. "zero1" adds ZeroRedundancyOptimizer for the dense parameters; a sparse
table keeps its plain optimizer, because ZeroRedundancyOptimizer would broadcast the whole table after every step.

Rank 0 is the process that the parent talks to. It starts the others as it was started, and passes every command on;
between turns all of them wait in a read of their stdin. Ranks meet through a file, and talk over the loopback device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.models import modules
from bench.peers.contender import CONTENDERS, Options, fetches
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Workload


class DistributedTrainer:
    """One rank. Rank 0 owns the other processes."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)
        self._others = [_start(options, rank) for rank in range(1, options.cores)] if options.rank == 0 else []
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{options.folder / 'meet'}", rank=options.rank, world_size=options.cores
        )
        self._workload = workload = Workload.load(options.workload)
        self._network = network = modules.network(workload)
        self.model = DistributedDataParallel(network)
        self.optimizers = _optimizers(workload, network, options.mode)
        self._batches = [_share(batch, options) for batch in modules.tensors(workload)]
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train on every rank; return the last loss, the mean over ranks. The last step of all ranks is waited for."""
        self._pass_on({"run": num_steps})
        loss = 0.0
        for step in range(num_steps):
            value = self._step(self._batches[self._next % len(self._batches)])
            self._next += 1
            if fetches(step, num_steps):
                loss = _mean(value.detach())
        dist.barrier()
        return loss

    def _step(self, batch: list[Tensor]) -> Tensor:
        loss = modules.loss_of(self.model(*batch[:-1]), batch[-1])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has not typed it
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def check(self) -> None:
        """Raise RuntimeError if the parameters of two ranks differ."""
        self._pass_on({"check": True})
        for name, parameter in self.model.named_parameters():
            value = parameter.detach()
            low, high = value.clone(), value.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
            if not torch.equal(low, high):
                raise RuntimeError(f"parameter {name} differs between ranks by up to {(high - low).max().item():.3g}")

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved on this rank; `check` sees to the others."""
        return movements(self._workload, modules.trained(self._workload, dict(self._network.named_parameters())))

    def close(self) -> None:
        """Wait for the other ranks, which end with their stdin."""
        for other in self._others:
            assert other.stdin is not None
            other.stdin.close()
        dist.destroy_process_group()
        for other in self._others:
            other.wait()

    def _pass_on(self, command: dict[str, Any]) -> None:
        for other in self._others:
            assert other.stdin is not None
            other.stdin.write(json.dumps(command).encode() + b"\n")
            other.stdin.flush()


def _start(options: Options, rank: int) -> subprocess.Popen[bytes]:
    key = next(k for k, kind in CONTENDERS.items() if kind.mode == options.mode and __name__.endswith(kind.module))
    command = [sys.executable, "-m", "bench.peers.serve", key, "--workload", str(options.workload)]
    command += ["--folder", str(options.folder), "--cores", str(options.cores), "--rank", str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def _share(batch: dict[str, Tensor], options: Options) -> list[Tensor]:
    """Cut out the rows of this rank; all ranks have equally many."""
    rows = len(next(iter(batch.values()))) // options.cores
    return [values[options.rank * rows : (options.rank + 1) * rows].clone() for values in batch.values()]


def _optimizers(workload: Workload, network: modules.Network, mode: str) -> list[Any]:
    made = modules.optimizers(workload, network)
    if mode == "zero1":
        kind: Any = torch.optim.SGD if workload.optimizer == "sgd" else torch.optim.Adam
        dense = network.dense_parameters()
        made[0] = ZeroRedundancyOptimizer(dense, optimizer_class=kind, lr=workload.learning_rate, fused=True)
    return made


def _mean(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def make(options: Options) -> DistributedTrainer:
    """Build one rank; rank 0 starts the others."""
    return DistributedTrainer(options)
