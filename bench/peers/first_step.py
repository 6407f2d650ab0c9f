"""One process from its start to the end of its first step: `python -m bench.peers.first_step KIND WORKLOAD BEGAN`.

KIND: one of `KINDS`; WORKLOAD: a file that `Workload.save` wrote; BEGAN: `time.monotonic` of the parent as it started
this process. The last line printed is {part: [processor seconds, wall-clock seconds]}, in the order of the parts; those
of `data` are what reading the workload took, the same for every contender. Processor time is of all threads.

Only numpy is imported before the contender's own framework.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Clock:
    """The time that each part took; what was before the first `end` belongs to that part."""

    def __init__(self, began: float) -> None:
        self.parts: dict[str, tuple[float, float]] = {}
        self._last = 0.0, began

    def end(self, part: str) -> None:
        """A part ends now."""
        now = time.process_time(), time.monotonic()
        self.parts[part] = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now


def data(clock: Clock, path: Path) -> Any:
    """Read the workload."""
    from bench.workloads.workload import Workload  # after the framework, whose import is timed

    workload = Workload.load(path)
    clock.end("data")
    return workload


def importing(clock: Clock, path: Path, cores: int) -> None:
    """`import torch` and nothing else: the floor of all that run on it."""
    import torch  # noqa: F401 - timed

    clock.end("import_torch")


def penstock(clock: Clock, path: Path, cores: int) -> None:
    """The program of `bench ctr`, recorded, started, run once on a replica a core. LeNet is captured as a module."""
    importing(clock, path, cores)
    os.environ["CPU_NUM"] = str(cores)
    import penstock as fluid

    clock.end("import_penstock")
    workload = data(clock, path)
    from bench.models import programs

    if not programs.is_ctr(workload):
        executor, loss, feeds = programs.trainer(workload)
        clock.end("recording")
    else:
        recorded = programs.record_ctr(workload)
        clock.end("recording")
        fluid.Executor(fluid.CPUPlace()).run(recorded.startup)
        loss, feeds = recorded.loss, recorded.feeds
        executor = fluid.ParallelExecutor(False, loss, recorded.main, build_strategy=programs.strategy())
        clock.end("startup_program")
    executor.run(fetch_list=[loss], feed=feeds[0])
    clock.end("first_run")


def eager(clock: Clock, path: Path, cores: int) -> None:
    """PyTorch, step by step."""
    _torch(clock, path, cores, "eager")


def compiled(clock: Clock, path: Path, cores: int) -> None:
    """torch.compile of all but sparse lookups."""
    _torch(clock, path, cores, "compile")


def _torch(clock: Clock, path: Path, cores: int, mode: str) -> None:
    importing(clock, path, cores)
    workload = data(clock, path)
    from bench.peers.torch_single import TorchTrainer

    trainer = TorchTrainer(workload, mode=mode, cores=cores)
    clock.end("model")
    trainer.run(1)
    clock.end("first_run")


def paddle(clock: Clock, path: Path, cores: int) -> None:
    """The original ParallelExecutor, in its Reduce mode as ours."""
    import paddle  # noqa: F401 - timed; only the peer's own environment has it

    clock.end("import_paddle")
    workload = data(clock, path)
    from bench.peers.paddle_executor import PaddleTrainer

    trainer = PaddleTrainer(workload, mode="reduce", cores=cores)
    clock.end("recording_and_startup")
    trainer.run(1)
    clock.end("first_run")


KINDS: dict[str, Callable[[Clock, Path, int], None]] = {
    "import_torch": importing,
    "penstock": penstock,
    "torch_eager": eager,
    "torch_compile": compiled,
    "paddle_pe": paddle,
}


def main(kind: str, path: str, began: str) -> None:
    """Run one contender and print what its parts took."""
    clock = Clock(float(began))
    KINDS[kind](clock, Path(path), len(os.sched_getaffinity(0)))
    print(json.dumps(clock.parts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
