"""TensorFlow's ParameterServerStrategy: one parameter server, one worker, and the coordinator that tells it what to do.

As its documents write it: variables on the server, a dataset on the worker, steps scheduled by a ClusterCoordinator,
gradients applied by the worker to the server's variables. Keras 3 does not run under this strategy any more, so the
update is written out (plain SGD). One worker, so steps follow one another and the training is that of one process.

Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from bench.peers.contender import Options
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Workload

TASKS = ("ps", "worker")


class TensorflowTrainer:
    """The coordinator. Owns the server's and the worker's processes."""

    def __init__(self, workload: Workload, options: Options) -> None:
        import tensorflow as tf  # only the peer's own environment has it

        self._workload, self._tf = workload, tf
        cluster = {task: [f"127.0.0.1:{_free_port()}"] for task in TASKS}
        self._processes = [_start(task, cluster, options.cores) for task in TASKS]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster | {"chief": [f"127.0.0.1:{_free_port()}"]}), rpc_layer="grpc"
        )
        strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self._variables = {name: tf.Variable(value, name=name) for name, value in workload.weights.items()}
        self._batches = iter(self._coordinator.create_per_worker_dataset(lambda: _dataset(tf, workload)))
        self._step = tf.function(lambda batches: _train(tf, workload, self._variables, next(batches)))

    def run(self, num_steps: int) -> float:
        """Train; return the last loss."""
        last = None
        for _ in range(num_steps):
            last = self._coordinator.schedule(self._step, args=(self._batches,))
        self._coordinator.join()
        return float(last.fetch())  # type: ignore[union-attr] # num_steps is at least 1

    def check(self) -> None:
        """There is one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved."""
        return movements(self._workload, {name: np.asarray(v.numpy()) for name, v in self._variables.items()})

    def close(self) -> None:
        """End server and worker, which would serve for ever."""
        for process in self._processes:
            process.kill()
            process.wait()


def _dataset(tf: Any, workload: Workload) -> Any:
    parts = tuple(workload.feeds[name] for name in ("ids", "dense", "label"))
    return tf.data.Dataset.from_tensor_slices(parts).repeat().prefetch(2)


def _train(tf: Any, workload: Workload, variables: dict[str, Any], batch: Any) -> Any:
    ids, dense, label = batch
    names = list(variables)
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(variables["table"], ids)
        width = workload.feeds["ids"].shape[2] * workload.weights["table"].shape[1]
        hidden = tf.concat([tf.reshape(rows, [-1, width]), dense], axis=1)
        last = sum(name.startswith("w") for name in names) - 1
        for layer in range(last + 1):
            hidden = tf.linalg.matmul(hidden, variables[f"w{layer}"]) + variables[f"b{layer}"]
            hidden = tf.nn.relu(hidden) if layer < last else hidden
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.squeeze(label, 1), hidden)
        loss = tf.reduce_mean(losses)
    for name, gradient in zip(names, tape.gradient(loss, [variables[name] for name in names]), strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            step = tf.IndexedSlices(workload.learning_rate * gradient.values, gradient.indices)
            variables[name].scatter_sub(step)
        else:
            variables[name].assign_sub(workload.learning_rate * gradient)
    return loss


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(task: str, cluster: dict[str, list[str]], cores: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.peers.tensorflow_pserver", task, json.dumps(cluster), str(cores)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def make(options: Options) -> TensorflowTrainer:
    """Build it."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    return TensorflowTrainer(Workload.load(options.workload), options)


def main() -> None:
    """Serve one task of a cluster until killed: `python -m bench.peers.tensorflow_pserver TASK CLUSTER CORES`."""
    from bench.peers.serve import end_with_parent

    end_with_parent()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("cluster", type=json.loads)
    parser.add_argument("cores", type=int)
    given = parser.parse_args()
    import tensorflow as tf  # only the peer's own environment has it

    tf.config.threading.set_intra_op_parallelism_threads(given.cores)
    tf.distribute.Server(
        tf.train.ClusterSpec(given.cluster), job_name=given.task, task_index=0, protocol="grpc", start=True
    ).join()


if __name__ == "__main__":
    main()
