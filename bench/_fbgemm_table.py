"""FBGEMM's table on CPUs as a peer of `bench table`: one process in an environment of its own.

Run as a script there (`serve`), it needs nothing of Penstock; `FbgemmTable` is the parent's end. One table of dense
rows by their number, one id a bag, summed: of its modes the fastest at this (unpooled, its backward pass is 30 times
slower). A training step is its forward pass, then its backward pass, which holds the optimizer; gradients are given.
Seconds are the process's own with one thread, of the clock on the wall with more.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from bench.peers import ROOT, environment
from bench.peers.remote import child_environment

START_LIMIT_S = 300.0
REPLY_LIMIT_S = 120.0
NUM_BATCHES = 8


class FbgemmTable:
    """The process. Raises PeerMissing at once if the environment is not there, RuntimeError if the process fails."""

    def __init__(self, *, rows: int, width: int, rule: str, batch: int, threads: int) -> None:
        self._settings = {"rows": rows, "width": width, "rule": rule, "batch": batch, "threads": threads}
        self._python = str(environment("fbgemm"))
        self._unread = b""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [self._python, "-m", "bench._fbgemm_table", json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**child_environment(os.environ, "installed"), "OMP_NUM_THREADS": str(self._settings["threads"])},
        )
        try:
            self._reply(START_LIMIT_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def pull(self) -> float:
        """Return the seconds of one batch's forward pass."""
        return self._ask("pull")

    def train(self) -> float:
        """Return the seconds of one batch's forward and backward pass."""
        return self._ask("train")

    def _ask(self, what: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return float(self._reply(REPLY_LIMIT_S)["seconds"])

    def _reply(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        number, deadline = self._process.stdout.fileno(), time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(number, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RuntimeError(f"the FBGEMM process has not answered within {limit_s:.0f} s")
                got = os.read(number, 1 << 16)
                if not got:
                    raise RuntimeError(
                        f"the FBGEMM process ended with {self._process.wait()}; to see why: "
                        f"{self._python} -m bench._fbgemm_table '{json.dumps(self._settings)}'"
                    )
                self._unread += got
        line, self._unread = self._unread.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def serve(settings: dict[str, Any]) -> None:
    """Answer "pull" and "train" with seconds a batch, until the input ends."""
    torch: Any = importlib.import_module("torch")
    importlib.import_module("fbgemm_gpu")  # registers the operators
    tables: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    configs: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    torch.set_num_threads(settings["threads"])
    rule = {"sgd": configs.EmbOptimType.EXACT_SGD, "adagrad": configs.EmbOptimType.EXACT_ADAGRAD}[settings["rule"]]
    where = (tables.EmbeddingLocation.HOST, tables.ComputeDevice.CPU)
    table = tables.SplitTableBatchedEmbeddingBagsCodegen(
        [(settings["rows"], settings["width"], *where)],
        optimizer=rule, learning_rate=0.01, pooling_mode=tables.PoolingMode.SUM,
        weights_precision=configs.SparseType.FP32,
    )  # fmt: skip
    batch = settings["batch"]
    torch.manual_seed(1)
    batches = [torch.randint(0, settings["rows"], (batch,)) for _ in range(NUM_BATCHES)]
    offsets, gradient = torch.arange(batch + 1), torch.randn(batch, settings["width"])
    clock = time.process_time if settings["threads"] == 1 else time.perf_counter
    print(json.dumps({"ready": True}), flush=True)
    for turn, line in enumerate(sys.stdin):
        ids = batches[turn % NUM_BATCHES]
        begin = clock()
        if json.loads(line) == "train":
            table(ids, offsets).backward(gradient)
        else:
            with torch.no_grad():
                table(ids, offsets)
        print(json.dumps({"seconds": clock() - begin}), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
