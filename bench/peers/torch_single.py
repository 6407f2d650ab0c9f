"""PyTorch in one process, all cores inside each operator. `mode`: "eager" or "compile".

Eager is what PyTorch's documents write: a module, sparse embeddings with their own optimizer, fused optimizers for all
else. "compile" is torch.compile with its default backend over the body and the loss, forward and backward. A lookup
with a sparse gradient stays in front of it, eager: inductor cannot compile sparse gradients and would break the graph
there in any case. Where nothing is sparse, everything is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.models import modules
from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Workload


class TorchTrainer:
    """A model, its optimizers and its batches. Owned by one thread."""

    def __init__(self, workload: Workload, *, mode: str, cores: int) -> None:
        torch.set_num_threads(cores)
        self.workload, self.model = workload, modules.network(workload)
        self.optimizers = modules.optimizers(workload, self.model)
        self._batches = [list(batch.values()) for batch in modules.tensors(workload)]
        self._compiled: Any = torch.compile(self._body) if mode == "compile" else self._body
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train; return the last loss."""
        loss = 0.0
        for step in range(num_steps):
            value = self._step(self._batches[self._next % len(self._batches)])
            self._next += 1
            if fetches(step, num_steps):
                loss = value.item()
        return loss

    def _body(self, features: Tensor, label: Tensor) -> Tensor:
        return modules.loss_of(self.model.body(features), label)

    def _step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self._compiled(self.model.front(*batch[:-1]), batch[-1])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has not typed it
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def check(self) -> None:
        """There is one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved."""
        return movements(self.workload, modules.trained(self.workload, dict(self.model.named_parameters())))

    def close(self) -> None:
        """Nothing to end."""


def make(options: Options) -> TorchTrainer:
    """Build it."""
    return TorchTrainer(Workload.load(options.workload), mode=options.mode, cores=options.cores)
