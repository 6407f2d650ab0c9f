"""PyTorch eager with FBGEMM's fused tables: all lookups in one operator, and all of their updates in its backward pass.

The network is the one of `torch_single`, its tables one `SplitTableBatchedEmbeddingBags` on the host: bags of one id,
as `bench table` has them, since its unpooled mode is far slower on CPUs. Ids are in FBGEMM's own layout, a table after
the other, before the first turn, as the other contenders' batches are in theirs. Slots of several ids are bags of so
many. Only SGD: on CPUs FBGEMM has no lazy
Adam. Runs in the peer's own environment, which has this project's torch, without the project.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import modules
from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Array, Workload


class FusedTables(nn.Module):
    """Tables in one operator: ids int64[features x rows] by feature, offsets int64[features x rows + 1].

    `features`: the table of each feature. `forward` gives float32[rows, sum of widths], side by side.
    """

    def __init__(self, tables: Mapping[str, Array], features: list[str], rate: float) -> None:
        super().__init__()
        kinds: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        settings: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        place = (kinds.EmbeddingLocation.HOST, kinds.ComputeDevice.CPU)
        self.names = list(tables)
        self.fused = kinds.SplitTableBatchedEmbeddingBagsCodegen(
            [(*table.shape, *place) for table in tables.values()],
            feature_table_map=[self.names.index(name) for name in features],
            optimizer=settings.EmbOptimType.EXACT_SGD,
            learning_rate=rate,
            weights_precision=settings.SparseType.FP32,
            pooling_mode=kinds.PoolingMode.SUM,
        )
        for values, table in zip(self.values(), tables.values(), strict=True):
            values.copy_(torch.tensor(table))

    def values(self) -> list[Tensor]:
        """Return each table's rows. Views."""
        found: list[Tensor] = self.fused.split_embedding_weights()
        return found

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        rows: Tensor = self.fused(ids, offsets)
        return rows


class FbgemmTrainer:
    """A model, its dense optimizer and its batches; the tables update themselves. Owned by one thread."""

    def __init__(self, workload: Workload, *, cores: int) -> None:
        if workload.optimizer != "sgd":
            raise ValueError(f"{workload.name} has the optimizer {workload.optimizer}; FBGEMM's tables on CPUs: sgd")
        torch.set_num_threads(cores)
        self.workload, network = workload, modules.network(workload)
        self._tables = {name: table for name, table in workload.weights.items() if name.startswith("table")}
        slots = workload.feeds["ids"].shape[2] if "ids" in workload.feeds else len(self._tables)
        features = ["table"] * slots if "table" in self._tables else list(self._tables)
        self._joined = _interest if workload.name == "din" else _beside
        self._front = FusedTables(self._tables, features, workload.learning_rate)
        self._body = network.body
        dense = network.dense_parameters()
        self._optimizer = torch.optim.SGD(dense, lr=workload.learning_rate, fused=True)
        made = modules.tensors(workload)
        self._batches = [(_by_feature(batch), batch) for batch in made]
        self._single = torch.arange(max(len(ids) for ids, _ in self._batches) + 1)
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train; return the last loss."""
        loss = 0.0
        for step in range(num_steps):
            value = self._step(*self._batches[self._next % len(self._batches)])
            self._next += 1
            if fetches(step, num_steps):
                loss = value.item()
        return loss

    def _step(self, ids: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        rows = self._front(ids, batch["offsets"] if "offsets" in batch else self._single[: len(ids) + 1])
        loss = modules.loss_of(self._body(self._joined(rows, batch)), batch["label"])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has not typed it
        self._optimizer.step()
        return loss

    def check(self) -> None:
        """There is one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved."""
        parts = [*self._front.values(), *self._body.parameters()]
        named = {str(number): tensor for number, tensor in enumerate(parts)}
        return movements(self.workload, modules.trained(self.workload, named))

    def close(self) -> None:
        """Nothing to end."""


def _by_feature(batch: Mapping[str, Tensor]) -> Tensor:
    """Return ids by feature, as bags are already; those of a history follow the targets'."""
    if "offsets" in batch:
        return batch["ids"]
    if "history" in batch:
        return torch.cat([batch["target"], batch["history"].flatten(0, 1)]).t().flatten()
    return batch["ids"].t().flatten()


def _beside(rows: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([rows, batch["dense"]], dim=1)


def _interest(rows: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    count, clicks = batch["history"].shape[:2]
    return rows[:count], rows[count:].view(count, clicks, -1), batch["history"][:, :, 0] == 0


def make(options: Options) -> FbgemmTrainer:
    """Build it."""
    return FbgemmTrainer(Workload.load(options.workload), cores=options.cores)
