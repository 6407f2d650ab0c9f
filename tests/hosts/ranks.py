"""A rank of a collective job: steps whose gradients all ranks exchange. Prints one."""

from __future__ import annotations

import os

import numpy as np

import penstock as fluid


def main() -> None:
    """Train, and print what all ranks have to agree on."""
    rank, endpoints = int(os.environ["PADDLE_TRAINER_ID"]), os.environ["PADDLE_TRAINER_ENDPOINTS"]
    x = fluid.layers.data(name="x", shape=[4], dtype="float64")
    loss = fluid.layers.mean(fluid.layers.fc(x, size=1, bias_attr=False, param_attr="w"))
    fluid.optimizer.SGD(1.0).minimize(loss)
    config = fluid.DistributeTranspilerConfig()
    config.mode, config.collective_mode = "collective", "grad_allreduce"
    here = os.environ["PADDLE_CURRENT_ENDPOINT"]
    fluid.DistributeTranspiler(config=config).transpile(trainer_id=rank, trainers=endpoints, current_endpoint=here)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    values = []
    for _ in range(2):  # ranks begin with rank 0's variables from the first step on
        exe.run(fluid.default_main_program(), {"x": np.full((2, 4), float(rank + 1))}, [loss])
        w = fluid.global_scope().find("w")
        assert w is not None
        values.append(w.numpy().copy())
    print("gradient", (values[0] - values[1]).ravel().round(9).tolist(), flush=True)


if __name__ == "__main__":
    main()
