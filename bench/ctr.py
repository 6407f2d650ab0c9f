"""`bench ctr --workload flights`: training the flights model, PyTorch eager against Penstock.

Both sides train the same network on the same batches, cut once and held in memory; handing a batch over (the feed) and
fetching the loss every 50 steps are part of the time. Contenders take turns within one process, and a ratio is made of
the medians, so that a machine that slows down slows both. Eager is PyTorch as its own documentation would write it:
two intra-op threads, sparse embeddings with SparseAdam, fused Adam for the tower.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

# an example is a folder of scripts, not an installed package
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "ctr_flights"))

import flights_data
import flights_model
import penstock as fluid
from bench.report import Report
from flights_model import EMBEDDING_WIDTH, LEARNING_RATE, TOWER

BATCH_SIZE = 1000
FETCH_EVERY = 50
INTRA_OP_THREADS = 2
ROUNDS = 7


class Contender(Protocol):
    """One side of a comparison. It keeps its model and its place in the batches from one call to the next."""

    @property
    def name(self) -> str:
        """The key in figures and ratios."""
        ...

    def run(self, num_steps: int) -> float:
        """Train `num_steps` steps and return samples per second, the fetches of the loss included."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's feed: `categorical` int64[slots, rows], `numeric` float32[rows, features], `label` int64[rows]."""

    categorical: Tensor
    numeric: Tensor
    label: Tensor


@dataclass(frozen=True, slots=True)
class Workload:
    """Full batches of one pass in a fixed order, and what a model has to know of the data."""

    batches: Sequence[Batch]
    vocabulary_sizes: tuple[int, ...]
    num_numeric: int

    @property
    def batch_size(self) -> int:
        return len(self.batches[0].label)


def flights_workload(*, batch_size: int = BATCH_SIZE, seed: int = 0) -> Workload:
    """Cut the training flights into batches; the odd last one is left out, so that every step costs the same."""
    flights = flights_data.load()
    cut = flights_data.batches(flights.train, batch_size, seed=seed, pass_index=0)
    batches = [
        Batch(torch.from_numpy(rows.categorical), torch.from_numpy(rows.numeric), torch.from_numpy(rows.label))
        for rows in cut
        if rows.num_rows == batch_size
    ]
    return Workload(batches, flights.vocabulary_sizes, flights.train.numeric.shape[1])


class EagerModel(nn.Module):
    """CTR-DNN with the initial values that the example's Program has."""

    def __init__(self, vocabulary_sizes: Sequence[int], num_numeric: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, EMBEDDING_WIDTH, sparse=True) for size in vocabulary_sizes)
        for table in self.tables.parameters():
            nn.init.normal_(table, 0.0, 0.05)
        widths = [len(vocabulary_sizes) * EMBEDDING_WIDTH + num_numeric, *TOWER]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [_linear(before, after), nn.ReLU()]
        self.tower = nn.Sequential(*layers, _linear(widths[-1], 2))

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """Return logits, float32[rows, 2]."""
        parts = [table(ids) for table, ids in zip(self.tables, categorical, strict=True)]
        logits: Tensor = self.tower(torch.cat([*parts, numeric], dim=1))
        return logits


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class EagerTrainer:
    """PyTorch eager as a contender. Owned by one thread."""

    name = "torch_eager"

    def __init__(self, workload: Workload, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = EagerModel(workload.vocabulary_sizes, workload.num_numeric)
        self.sparse = torch.optim.SparseAdam(list(self.model.tables.parameters()), lr=LEARNING_RATE)
        self.dense = torch.optim.Adam(self.model.tower.parameters(), lr=LEARNING_RATE, fused=True)
        self.batch_size = workload.batch_size
        self.losses: list[float] = []
        self._batches: Iterator[Batch] = itertools.cycle(workload.batches)

    def run(self, num_steps: int) -> float:
        torch.set_num_threads(INTRA_OP_THREADS)  # each time: the other contender may have changed it
        start = time.perf_counter()
        for step in range(1, num_steps + 1):
            loss = self._step(next(self._batches))
            if step % FETCH_EVERY == 0:
                self.losses.append(loss.item())
        return num_steps * self.batch_size / (time.perf_counter() - start)

    def _step(self, batch: Batch) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch.categorical, batch.numeric), batch.label)
        self.sparse.zero_grad()
        self.dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has not typed it
        self.sparse.step()  # type: ignore[no-untyped-call] # nor this
        self.dense.step()
        return loss


def alternate(contenders: Sequence[Contender], *, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Let each contender warm up once, then run in turns; return the samples per second of every round by name.

    The order is turned round after each round, so that neither side always runs on what the other left in the caches.
    """
    for contender in contenders:
        contender.run(num_steps)
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for round_index in range(num_rounds):
        for contender in contenders if round_index % 2 == 0 else reversed(contenders):
            rates[contender.name].append(contender.run(num_steps))
    return rates


class PenstockTrainer:
    """Penstock as a contender: the example's own Program, two replicas, Reduce. Owned by one thread."""

    name = "penstock"

    def __init__(self, workload: Workload, *, seed: int) -> None:
        network = flights_model.build(workload.vocabulary_sizes, seed=seed)
        fluid.Executor(fluid.CPUPlace()).run(network.startup)
        strategy = fluid.BuildStrategy()
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        self.executor = fluid.ParallelExecutor(
            use_cuda=False, loss_name=network.loss, main_program=network.main, build_strategy=strategy
        )
        self.loss_name = network.loss
        self.batch_size = workload.batch_size
        self.losses: list[float] = []
        self._batches = itertools.cycle(workload.batches)

    def run(self, num_steps: int) -> float:
        start = time.perf_counter()
        for step in range(1, num_steps + 1):
            wanted = [self.loss_name] if step % FETCH_EVERY == 0 else []
            fetched = self.executor.run(fetch_list=wanted, feed=flights_model.feed(next(self._batches)))
            if wanted:
                self.losses.append(float(fetched[0].mean()))
        return num_steps * self.batch_size / (time.perf_counter() - start)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--workload", choices=["flights"], default="flights", help="what is trained (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="steps of one round (%(default)s)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Run both contenders in turns; the ratio is of the medians of samples per second."""
    os.environ["CPU_NUM"] = str(INTRA_OP_THREADS)  # as many cores for us as intra-op threads for eager
    workload = flights_workload()
    ours, eager = PenstockTrainer(workload, seed=1), EagerTrainer(workload, seed=1)
    rates = alternate([ours, eager], num_rounds=rounds, num_steps=extra.steps)
    report = Report("ctr", rounds)
    medians = {name: report.add(f"{name}_samples_per_s", samples, digits=0) for name, samples in rates.items()}
    for trainer in (ours, eager):
        report.figures[f"{trainer.name}_last_loss"] = round(trainer.losses[-1], 4)
    report.ratios[eager.name] = round(medians[ours.name] / medians[eager.name], 3)
    return report
