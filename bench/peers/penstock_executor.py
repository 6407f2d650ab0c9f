"""Penstock as a contender: ParallelExecutor on a replica for each core. `mode`: "reduce", "all_reduce" or "padded".

"padded" is Reduce with slots of several ids as padded batches, where "reduce" has them ragged.
"""

from __future__ import annotations

import os

import torch

from bench.models import programs
from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Workload


class PenstockTrainer:
    """Feeds numpy arrays (tensors where the model was captured), one dict a step. Owned by one thread."""

    def __init__(self, workload: Workload, *, mode: str, cores: int) -> None:
        os.environ["CPU_NUM"] = str(cores)
        self._workload = workload
        self._executor, self._loss, self._feeds = programs.trainer(
            workload, build=programs.strategy("reduce" if mode == "padded" else mode), padded=mode == "padded"
        )
        self._parameters = {parameter.name for parameter in self._executor.core.program.parameters()}
        self._step = 0

    def run(self, num_steps: int) -> float:
        """Train; return the last loss, a mean over replicas of equal size."""
        loss = 0.0
        for step in range(num_steps):
            wanted = [self._loss] if fetches(step, num_steps) else []
            fetched = self._executor.run(fetch_list=wanted, feed=self._feeds[self._step % len(self._feeds)])
            self._step += 1
            if wanted:
                loss = float(fetched[0].mean())
        return loss

    def check(self) -> None:
        """Raise RuntimeError if a weight of two replicas differs. In Reduce mode they have one copy of each."""
        core = self._executor.core
        first: dict[str, torch.Tensor] = {}
        for variable in core.graph(core.num_replicas).variables.values():
            if variable.name in self._parameters:
                value = core.memory.tensor(core.program, variable)
                if not torch.equal(first.setdefault(variable.name, value), value):
                    raise RuntimeError(f"parameter {variable.name} differs between replicas: no fair race")
        if first.keys() != self._parameters:
            raise RuntimeError(f"not found on any replica: {sorted(self._parameters - first.keys())}")

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved."""
        scope = self._executor.core.memory.scope
        return movements(self._workload, programs.trained(self._workload, scope))

    def close(self) -> None:
        """Stop the threads."""
        self._executor.close()


def make(options: Options) -> PenstockTrainer:
    """Build it."""
    return PenstockTrainer(Workload.load(options.workload), mode=options.mode, cores=options.cores)
