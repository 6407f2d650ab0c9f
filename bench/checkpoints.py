"""`bench checkpoints`: for how long a training is held by a checkpoint, and what its steps cost while one is written.

A model of 64 MiB of parameters (one layer, SGD) trains on one replica. Interleaved: a checkpoint is begun and the
training goes on until it is committed; then `torch.save` of the same values, with a flush to the disk, on that thread.
`held_ms`: what `CheckpointManager.save` takes of the training thread (the first one, which gets its memory from the
system, apart); `step_ms`, `step_while_writing_ms`: medians of steps. A ratio is torch.save's time over `held_ms`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import penstock as fluid
from bench.report import Report

ROUNDS = 9
_WIDTH, _ROWS, _STEPS = 4096, 64, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--width", type=int, default=_WIDTH, help="of the layer: 4096 is 64 MiB (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")


class Training:
    """One layer, trained by SGD."""

    def __init__(self, width: int) -> None:
        self.main, startup = fluid.Program(seed=1), fluid.Program(seed=1)
        with fluid.program_guard(self.main, startup):
            x = fluid.layers.data("x", [width])
            loss = fluid.layers.mean(fluid.layers.fc(x, width))
            fluid.optimizer.SGD(0.1).minimize(loss)
        self.scope, self._exe = fluid.Scope(), fluid.Executor()
        self._exe.run(startup, scope=self.scope)
        self._compiled = fluid.CompiledProgram(self.main)
        self._feed = {"x": np.random.default_rng(0).normal(size=(_ROWS, width)).astype("float32")}

    def step(self) -> float:
        """Train a step; return its milliseconds."""
        begin = time.perf_counter()
        self._exe.run(self._compiled, self._feed, [], scope=self.scope)
        return 1e3 * (time.perf_counter() - begin)

    def values(self) -> dict[str, torch.Tensor]:
        """Return what is saved."""
        found = {name: self.scope.find(name) for name in self.scope.names()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def by_torch(values: dict[str, torch.Tensor], path: Path) -> float:
    """Save by torch.save and bring it to the disk; return the milliseconds."""
    begin = time.perf_counter()
    with path.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    return 1e3 * (time.perf_counter() - begin)


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure."""
    training = Training(extra.width)
    report = Report("checkpoints", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    report.figures["megabytes"] = round(sum(t.nbytes for t in training.values().values()) / 1e6, 3)
    for _ in range(3):
        training.step()
    held, written, plain, during, synchronous = [], [], [], [], []
    with tempfile.TemporaryDirectory(dir=extra.folder) as folder:
        manager = fluid.io.CheckpointManager(Path(folder) / "ours", training.main, scope=training.scope, keep=1)
        for _ in range(rounds + 1):
            plain += [training.step() for _ in range(_STEPS)]
            manager.advance()
            begin = time.perf_counter()
            manager.save()
            held.append(1e3 * manager.statistics.last_held_s)
            during.append(training.step())
            while manager.is_writing:
                during.append(training.step())
            written.append(1e3 * (time.perf_counter() - begin))
            manager.wait()
            synchronous.append(by_torch(training.values(), Path(folder) / "torch.pt"))
        manager.close()
    report.figures["first_held_ms"] = round(held[0], 2)
    middle = report.add("held_ms", held[1:], digits=2)
    report.add("committed_after_ms", written[1:], digits=1)
    report.add("step_ms", plain, digits=2)
    report.add("step_while_writing_ms", during, digits=2)
    report.add("torch_save_ms", synchronous[1:], digits=1)
    report.ratios["torch_save"] = round(statistics.median(synchronous[1:]) / middle, 2)
    return report
