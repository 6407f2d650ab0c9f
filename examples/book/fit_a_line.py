"""Linear regression: the progress of diabetes a year on, from ten measurements (scikit-learn's bundled data).

    CPU_NUM=2 python examples/book/fit_a_line.py --mode reduce

Quality: the mean squared error on the 88 held-back patients is at most 2 % above that of least squares, solved exactly
on the same training rows. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes

import penstock as fluid
from penstock.scope import Scope

Rows = tuple[NDArray[np.float32], NDArray[np.float32]]
NUM_TEST, BATCH_SIZE, LIMIT = 88, 59, 1.02
MODES = {"all_reduce": "AllReduce", "reduce": "Reduce"}


def load() -> tuple[Rows, Rows]:
    """Return (training, test): measurements [n, 10] and progress [n, 1], standardised by the training rows."""
    bundled: Any = load_diabetes()
    order = np.random.default_rng(0).permutation(len(bundled.target))
    x, y = bundled.data[order], bundled.target[order, None]
    kept = slice(NUM_TEST, None)
    x, y = ((a - a[kept].mean(0)) / a[kept].std(0) for a in (x, y))
    x, y = x.astype(np.float32), y.astype(np.float32)
    return (x[kept], y[kept]), (x[:NUM_TEST], y[:NUM_TEST])


def least_squares(train: Rows, test: Rows) -> float:
    """Return the test error of the exact solution."""
    ones = [np.hstack([x, np.ones((len(x), 1), np.float32)]) for x, _ in (train, test)]
    solution = np.linalg.lstsq(ones[0], train[1], rcond=None)[0]
    return float(np.mean((ones[1] @ solution - test[1]) ** 2))


def run(mode: str, *, num_passes: int = 40) -> tuple[float, float]:
    """Train on CPU_NUM replicas; return the test errors (ours, least squares)."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 1
    with fluid.program_guard(main, startup):
        x, y = fluid.data("x", [None, 10]), fluid.data("y", [None, 1])
        predicted = fluid.layers.fc(x, size=1)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(predicted, y))
        test_program = main.clone(for_test=True)
        rate = fluid.layers.cosine_decay(0.02, step_each_epoch=6, epochs=num_passes)
        fluid.optimizer.Momentum(rate, 0.9).minimize(loss)
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    strategy = fluid.BuildStrategy()
    strategy.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, MODES[mode])
    execution = fluid.ExecutionStrategy()
    execution.num_threads = os.cpu_count() or 1  # one core an operator: these are small
    trainer = fluid.ParallelExecutor(False, loss.name, main, None, execution, strategy, scope=scope)
    train, test = load()
    for number in range(num_passes):
        order = np.random.default_rng(number).permutation(len(train[0]))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            trainer.run([loss], {"x": train[0][rows], "y": train[1][rows]})
    trainer.close()
    [error] = exe.run(test_program, {"x": test[0], "y": test[1]}, [loss], scope=scope)
    return float(error.reshape(())), least_squares(train, test)


def main() -> None:
    """Train and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="all_reduce")
    error, exact = run(parser.parse_args().mode)
    print(json.dumps({"test_error": round(error, 4), "least_squares": round(exact, 4), "limit": LIMIT}))


if __name__ == "__main__":
    main()
