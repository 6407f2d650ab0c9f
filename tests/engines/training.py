"""A regression on trainers and servers that trains until a file is there: the job of the tests of engines and hosts.

    training.py FOLDER

Each trainer writes FOLDER/EPOCH-trainer-INDEX once it has trained; when FOLDER/go exists, all end after the same step,
and trainer 0 prints its first and its last loss.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import StrategyFactory

FEATURES, BATCH, STEPS_A_ROUND, MAX_ROUNDS = 300, 16, 5, 10_000


def main(folder: Path) -> None:
    """Be a trainer or a server, as the environment says."""
    x = fluid.layers.data(name="x", shape=[FEATURES], dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    hidden = fluid.layers.fc(x, size=64, act="tanh")
    loss = fluid.layers.mean(fluid.layers.square_error_cost(input=fluid.layers.fc(hidden, size=1), label=y))
    strategy = StrategyFactory.create_sync_strategy()
    strategy.set_program_config({"min_block_size": 8192})  # so that both servers have a part
    fleet.init(role_maker.PaddleCloudRoleMaker())
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.05), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        train(loss, folder)


def train(loss: object, folder: Path) -> None:
    """Train rounds of steps until all trainers have seen that the file is there."""
    exe = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    exe.run(fleet.startup_program)
    index, rng = fleet.worker_index(), np.random.default_rng(fleet.worker_index())
    losses: list[float] = []
    for _ in range(MAX_ROUNDS):
        for _ in range(STEPS_A_ROUND):
            x = rng.standard_normal((BATCH, FEATURES)).astype("float32")
            (found,) = exe.run(fleet.main_program, {"x": x, "y": x[:, :3].sum(1, keepdims=True)}, [loss])
            losses.append(float(np.mean(found)))
        (folder / f"{os.environ['PENSTOCK_EPOCH']}-trainer-{index}").touch()
        seen = np.zeros(1)
        fleet.all_reduce_worker(np.array([float((folder / "go").exists())]), seen)
        if seen[0] == fleet.worker_num():
            break
    if fleet.is_first_worker():
        print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps", flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
