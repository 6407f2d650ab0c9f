"""Data sets of paddlepaddle 2.6.2 for `bench datafeed`, in a process of the peer's own environment, which has no torch.

`python -m bench.peers.paddle_dataset WHAT THREADS FOLDER FILE…` answers each line of stdin, `"cpu"` or `"wall"`, with
{"seconds"}: of the processor over all threads, or of the wall. WHAT is `memory`: an InMemoryDataset is loaded, shuffled
and gone through once, with a program that only looks at the labels, so that batches are made (what the processes of its
pipe command take is left out, in its favour); or `train`: `train_from_dataset` of CTR-DNN (the workload `criteo`) over
a QueueDataset. The number of threads stands for the process: 2.6.2 makes its pool of trainers once, and ends the
process if it has another size later. FOLDER is where `train_from_dataset` writes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import paddle
from paddle import base, static

from bench import workloads
from bench.peers import paddle_programs
from bench.peers.serve import end_with_parent, private_stdout

BATCH, NUM_DENSE, NUM_IDS = 1000, 13, 26


class Datasets:
    """What is measured. `what`: "memory" or "train"."""

    def __init__(self, what: str, threads: int, files: list[str]) -> None:
        paddle.enable_static()
        self._threads, self._files = threads, files
        self._exe, self._main, startup = static.Executor(paddle.CPUPlace()), static.Program(), static.Program()
        with static.program_guard(self._main, startup):
            if what == "train":
                paddle_programs.record(workloads.build("criteo"))
            else:
                _record_look()
        self._exe.run(startup)
        names = ["dense", *(f"C{i + 1}" for i in range(NUM_IDS)), "label"]
        self._inputs = [self._main.global_block().var(name) for name in names]

    def memory(self) -> None:
        """Load, shuffle, and go through once."""
        dataset = self._dataset("InMemoryDataset")
        dataset.load_into_memory()
        dataset.local_shuffle()
        self._exe.infer_from_dataset(self._main, dataset)
        dataset.release_memory()

    def train(self) -> None:
        """Train on each row once."""
        self._exe.train_from_dataset(self._main, self._dataset("QueueDataset"))

    def _dataset(self, kind: str) -> Any:
        dataset = base.DatasetFactory().create_dataset(kind)
        dataset.set_use_var(self._inputs)
        dataset.set_batch_size(BATCH)
        dataset.set_thread(self._threads)
        dataset.set_filelist(self._files)
        dataset.set_pipe_command("cat")
        return dataset


def _record_look() -> None:
    static.data("dense", [None, NUM_DENSE], "float32")
    for slot in range(NUM_IDS):
        static.data(f"C{slot + 1}", [None, 1], "int64")
    paddle.sum(static.data("label", [None, 1], "int64"))


def timed(action: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the seconds of an action."""
    begin = clock()
    action()
    return clock() - begin


def main() -> None:
    """Serve until stdin ends."""
    what, threads, folder, *files = sys.argv[1:]
    end_with_parent()
    replies = private_stdout()
    os.chdir(folder)
    datasets = Datasets(what, int(threads), files)
    action = datasets.train if what == "train" else datasets.memory
    print(json.dumps({"ready": paddle.__version__}), file=replies)
    for line in sys.stdin:
        clock = time.process_time if json.loads(line) == "cpu" else time.perf_counter
        print(json.dumps({"seconds": timed(action, clock)}), file=replies)


if __name__ == "__main__":
    main()
