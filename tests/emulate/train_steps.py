"""A program for an emulated processor: three steps of CTR-DNN on default settings; print one JSON object.

The network, its optimizer and the strategy are those of `examples/ctr_flights`, on 64 rows from a generator. The last
line has `losses` (of each step) and `kernels` (how many matrix products run which kernel).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import flights_model
import penstock as fluid
from flights_data import CATEGORICAL, NUMERIC
from penstock.machine.cache import cache_folder
from penstock.native.matrix_cache import FILE_NAME
from penstock.native.matrix_kernels import decide

NUM_ROWS, VOCABULARY, NUM_STEPS = 64, 40, 3


@dataclass(frozen=True, slots=True)
class Rows:
    """What is fed."""

    categorical: Any
    numeric: Any
    label: Any


def rows() -> Rows:
    """Return a batch whose label follows from its features."""
    random = np.random.default_rng(1)
    categorical = random.integers(0, VOCABULARY, (len(CATEGORICAL), NUM_ROWS))
    numeric = random.normal(size=(NUM_ROWS, len(NUMERIC))).astype(np.float32)
    return Rows(categorical, numeric, (numeric[:, 0] > 0).astype(np.int64))


def losses() -> list[float]:
    """Train on one batch and return the loss of each step."""
    network = flights_model.build([VOCABULARY] * len(CATEGORICAL), seed=1)
    fluid.Executor(fluid.CPUPlace()).run(network.startup)
    strategy = fluid.BuildStrategy()
    strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    trainer = fluid.ParallelExecutor(
        use_cuda=False, loss_name=network.loss, main_program=network.main, build_strategy=strategy
    )
    feed = flights_model.feed(rows())
    return [float(np.mean(trainer.run(fetch_list=[network.loss], feed=feed)[0])) for _ in range(NUM_STEPS)]


def kernels() -> dict[str, int]:
    """Count the matrix products by the kernel that was chosen, as the cache folder has it."""
    machines = json.loads((cache_folder() / FILE_NAME).read_text())["machines"]
    return dict(Counter(decide(seconds) for entries in machines.values() for seconds in entries.values()))


if __name__ == "__main__":
    print(json.dumps({"losses": losses(), "kernels": kernels()}))
