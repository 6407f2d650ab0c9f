"""A fleet script with a table of any ids (`is_distributed=True`), Adam, and a layer that is cut; saves and loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet


def network() -> Any:
    """Return the loss."""
    fluid.default_startup_program().random_seed = 11
    ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    rows = fluid.layers.embedding(input=ids, size=[1000, 100], is_sparse=True, is_distributed=True)
    hidden = fluid.layers.fc(input=rows, size=200, act="tanh")
    return fluid.layers.mean(fluid.layers.square_error_cost(input=fluid.layers.fc(input=hidden, size=1), label=y))


def batch(step: int) -> dict[str, Any]:
    """Ids all over int64, some of them in every batch."""
    draw = np.random.default_rng(step)
    number = draw.integers(0, 40, (32, 1))
    return {"ids": (number - 20) * (2**62 // 20), "y": np.sin(number).astype("float32")}


def main() -> None:
    """Do what this process's role asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first_step", type=int, default=0)
    parser.add_argument("--save_after", type=int, default=0)
    parser.add_argument("--load")
    args = parser.parse_args()
    loss = network()
    fleet.init(role_maker.PaddleCloudRoleMaker())
    fleet.distributed_optimizer(fluid.optimizer.Adam(0.01)).minimize(loss)
    if fleet.is_server():
        fleet.init_server(args.load)
        fleet.run_server()
        return
    exe = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    exe.run(fleet.startup_program)
    losses = []
    for number in range(args.steps):
        if args.save_after and number == args.save_after:
            fleet.save_persistables(exe, Path("save"))
        (found,) = exe.run(fleet.main_program, feed=batch(args.first_step + number), fetch_list=[loss])
        losses.append(float(np.mean(found)))
    print(json.dumps(losses))
    fleet.stop_worker()


if __name__ == "__main__":
    main()
