"""Passes over a QueueDataset that a session watches, with and without records of the data feed's work.

Two programs: CTR-DNN in batches of 1000, and the worst that can be, one small layer in batches of 16, whose steps take
a fraction of a millisecond. Both sides are watched alike; they differ in the records alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import penstock as fluid
from bench import workloads
from bench.datafeed import NUM_DENSE, NUM_IDS, column_of, dataset_over
from bench.models.programs import record_ctr
from penstock import telemetry
from penstock.telemetry import process
from penstock.telemetry.sessions import Watched

BATCHES = {"ctr": 40, "small": 4000}
BATCH_SIZE = {"ctr": 1000, "small": 16}
Pass = Callable[[bool], float]


def passes(folder: Path, session: Watched) -> dict[str, Pass]:
    """Return what makes a pass of each program, recorded or not, and returns its seconds."""
    made = {"ctr": _ctr(folder / "ctr.txt"), "small": _small(folder / "small.txt")}
    return {name: _pass(*one, BATCH_SIZE[name], session) for name, one in made.items()}


def _pass(main: Any, startup: Any, variables: list[Any], path: Path, batch_size: int, session: Watched) -> Pass:
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)

    def run(recorded: bool) -> float:
        dataset = dataset_over(path, variables)
        dataset.set_batch_size(batch_size)
        trace = session.input() if recorded else None
        with patch.object(process._process, "session", session), patch.object(telemetry, "input_trace", lambda: trace):
            begin = time.perf_counter()
            exe.train_from_dataset(main, dataset, scope=scope)
            return time.perf_counter() - begin

    return run


def _ctr(path: Path) -> tuple[Any, Any, list[Any], Path]:
    made = record_ctr(workloads.build("criteo"))
    variables = [made.main.handle(slot.name) for slot in sorted(made.main.feeds(), key=column_of)]
    random = np.random.default_rng(0)
    lines = []
    for _ in range(BATCHES["ctr"] * BATCH_SIZE["ctr"]):
        dense = " ".join(f"{x:.4f}" for x in random.random(NUM_DENSE))
        ids = " 1 ".join(map(str, random.integers(0, 1_000_000, NUM_IDS)))
        lines.append(f"{NUM_DENSE} {dense} 1 {ids} 1 {random.integers(0, 2)}\n")
    path.write_text("".join(lines))
    return made.main, made.startup, variables, path


def _small(path: Path) -> tuple[Any, Any, list[Any], Path]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [4])
        fluid.optimizer.SGD(learning_rate=1e-3).minimize(fluid.layers.mean(fluid.layers.fc(x, 1)))
    path.write_text("4 0.1 0.2 0.3 0.4\n" * BATCHES["small"] * BATCH_SIZE["small"])
    return main, startup, [x], path
