"""Ratings of films from who rates and what is rated: several embeddings and a cosine (generated data).

    CPU_NUM=2 python examples/book/recommender.py --mode reduce

Every user and every film has a hidden direction, which depends on age, job and genre and on themselves; a rating is
2.5 + 2.5 cos of the angle, with noise of deviation 0.25. Quality: the root mean squared error on held-back ratings is
at most 0.4; always guessing the mean gives about 1.2, and the noise alone 0.25. The last line printed is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as fluid
from penstock.scope import Scope

Arrays = dict[str, NDArray[Any]]
SIZES = {"user": 200, "age": 7, "job": 12, "film": 150, "genre": 9}
NUM_RATINGS, NUM_TEST, BATCH_SIZE, LIMIT = 16_000, 2_000, 250, 0.4
MODES = {"all_reduce": "AllReduce", "reduce": "Reduce"}
L: Any = fluid.layers


def load() -> tuple[Arrays, Arrays]:
    """Return (training, test): ids int64 [n, 1] and rating float32 [n, 1]."""
    draw = np.random.default_rng(5)
    directions = {name: draw.normal(size=(size, 4)) for name, size in SIZES.items()}
    groups = {"age": "user", "job": "user", "genre": "film"}
    group_of = {name: draw.integers(0, SIZES[name], size=SIZES[owner]) for name, owner in groups.items()}
    ids = {name: draw.integers(0, SIZES[name], size=NUM_RATINGS) for name in ("user", "film")}
    ids |= {name: group_of[name][ids[owner]] for name, owner in groups.items()}

    def hidden(**weights: float) -> NDArray[Any]:
        parts = [directions[n][ids[n]] * w for n, w in weights.items()]
        return np.asarray(np.add.reduce(parts))

    user = hidden(user=0.5, age=1.0, job=1.0)
    film = hidden(film=0.5, genre=1.5)
    cosine = (user * film).sum(1) / np.linalg.norm(user, axis=1) / np.linalg.norm(film, axis=1)
    rating = 2.5 + 2.5 * cosine + draw.normal(0.0, 0.25, size=NUM_RATINGS)
    arrays: Arrays = {name: ids[name][:, None] for name in SIZES}
    arrays["rating"] = rating[:, None].astype(np.float32)
    return {n: a[NUM_TEST:] for n, a in arrays.items()}, {n: a[:NUM_TEST] for n, a in arrays.items()}


def side(names: tuple[str, ...]) -> Any:
    """Return the features [n, 16] of users or of films: an embedding for each id, mixed."""
    parts = [fluid.embedding(fluid.data(name, [None, 1], "int64"), [SIZES[name], 16], is_sparse=True) for name in names]
    return L.fc(L.concat(parts, axis=1), 16, act="tanh")


def run(mode: str, *, num_passes: int = 4) -> float:
    """Train on CPU_NUM replicas; return the root mean squared error on the test ratings."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 1
    with fluid.program_guard(main, startup):
        cosine = L.cos_sim(side(("user", "age", "job")), side(("film", "genre")))
        predicted = L.scale(cosine, scale=2.5, bias=2.5)
        loss = L.mean(L.square_error_cost(predicted, fluid.data("rating", [None, 1])))
        test_program = main.clone(for_test=True)
        fluid.optimizer.Adam(0.01).minimize(loss)
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    strategy = fluid.BuildStrategy()
    strategy.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, MODES[mode])
    execution = fluid.ExecutionStrategy()
    execution.num_threads = os.cpu_count() or 1  # one core an operator: these are small
    trainer = fluid.ParallelExecutor(False, loss.name, main, None, execution, strategy, scope=scope)
    train, test = load()
    for number in range(num_passes):
        order = np.random.default_rng(number).permutation(NUM_RATINGS - NUM_TEST)
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            trainer.run([loss], {name: array[rows] for name, array in train.items()})
    trainer.close()
    [error] = exe.run(test_program, test, [loss], scope=scope)
    return math.sqrt(float(error.reshape(())))


def main() -> None:
    """Train and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="all_reduce")
    print(json.dumps({"test_rmse": round(run(parser.parse_args().mode), 4), "limit": LIMIT}))


if __name__ == "__main__":
    main()
