"""A script of Fluid's under torchrun: who it is stands in torchrun's variables, and nobody lists endpoints."""

import json
import os

import numpy as np

import penstock as fluid


def train(rows: slice, *, trainers: int = 1, rank: int = 0, steps: int = 5) -> list[float]:
    """Return the parameters after some steps on some rows of the data."""
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(8, 4)), draw.normal(size=(8, 1))
    fluid.default_startup_program().random_seed = 7
    features = fluid.layers.data(name="x", shape=[4], dtype="float64")
    label = fluid.layers.data(name="y", shape=[1], dtype="float64")
    prediction = fluid.layers.fc(input=features, size=1)
    loss = fluid.layers.mean(fluid.layers.square_error_cost(input=prediction, label=label))
    fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
    executor = fluid.ParallelExecutor(False, loss_name=loss.name, num_trainers=trainers, trainer_id=rank)
    for _ in range(steps):
        executor.run([loss], {"x": x[rows], "y": y[rows]})
    scope = fluid.global_scope()
    parameters = fluid.default_main_program().parameters()
    return [float(v) for p in parameters for v in np.array(scope.find_var(p.name)).flatten()]


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = train(slice(8 // size * rank, 8 // size * (rank + 1)), trainers=size, rank=rank)
    if rank == 0:
        print(json.dumps(found))
