"""FBGEMM's table on CPUs as a peer of `bench table`: one process in an environment of its own.

Run as a script there (`serve`), it needs nothing of Penstock; `FbgemmTable` is the parent's end. One table of dense
rows by their number, one id a bag, summed: of its modes the fastest at this (unpooled, its backward pass is 30 times
slower). A training step is its forward pass, then its backward pass, which holds the optimizer; gradients are given.
Seconds are the process's own with one thread, of the clock on the wall with more.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

from bench.peers import environment
from bench.peers.timed import TimedPeer

NUM_BATCHES = 8


class FbgemmTable(TimedPeer):
    """The process. Raises PeerMissing at once if the environment is not there."""

    def __init__(self, *, rows: int, width: int, rule: str, batch: int, threads: int) -> None:
        settings = {"rows": rows, "width": width, "rule": rule, "batch": batch, "threads": threads}
        command = [str(environment("fbgemm")), "-m", "bench._fbgemm_table", json.dumps(settings)]
        super().__init__(command, threads=threads)

    def pull(self) -> float:
        """Return the seconds of one batch's forward pass."""
        return self.ask("pull")

    def train(self) -> float:
        """Return the seconds of one batch's forward and backward pass."""
        return self.ask("train")


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
