"""A process of a job with parameter servers that saves checkpoints, and goes on from what there is.

`pserver_job.py pserver INDEX …`, `pserver_job.py trainer INDEX …`; see `options`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.distributed import nccl2_job

import penstock as fluid

ROWS = 12
MODES = {"sync": True, "async": False}


def options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["pserver", "trainer"])
    parser.add_argument("index", type=int)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--mode", default="sync", choices=MODES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every_steps", type=int, default=2)
    parser.add_argument("--die", type=int, default=-1, help="trainer 0 kills itself after so many steps")
    parser.add_argument("--short", type=int, default=-1, help="trainer 1 has data for so many steps only")
    return parser.parse_args(arguments)


def network() -> Any:
    """Record a small model: layers and a sparse table in float64, a distributed table; return its loss."""
    x = fluid.layers.data(name="x", shape=[nccl2_job.FEATURES], dtype="float64")
    y = fluid.layers.data(name="y", shape=[1], dtype="float64")
    ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
    sparse = fluid.layers.embedding(ids, [nccl2_job.IDS, 4], is_sparse=True, dtype="float64")
    wide = fluid.layers.embedding(ids, [1000, 4], is_sparse=True, is_distributed=True)
    joined = fluid.layers.concat([x, sparse.reshape(-1, 4), fluid.layers.cast(wide.reshape(-1, 4), "float64")], axis=1)
    hidden = fluid.layers.fc(joined, 1400, act="tanh")  # no dropout: it follows each trainer's own rows
    return fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), y))


def main(arguments: list[str]) -> None:
    """Do what the role does."""
    asked = options(arguments)
    fluid.default_startup_program().random_seed = fluid.default_main_program().random_seed = 5
    loss = network()
    rate = fluid.layers.exponential_decay(0.02, decay_steps=3, decay_rate=0.9)
    fluid.optimizer.Adam(learning_rate=rate, lazy_mode=True).minimize(loss)
    config = fluid.DistributeTranspilerConfig()
    config.min_block_size = 8192  # the layer is cut over the servers
    transpiler = fluid.DistributeTranspiler(config)
    transpiler.transpile(asked.index, pservers=asked.servers, trainers=asked.trainers, sync_mode=MODES[asked.mode])
    exe = fluid.Executor(fluid.CPUPlace())
    if asked.role == "pserver":
        main, startup = transpiler.get_pserver_programs(asked.servers.split(",")[asked.index])
        exe.run(startup)
        print("restored", fluid.io.CheckpointManager(asked.checkpoints, main).restore(), flush=True)
        exe.run(main)
        return
    program = transpiler.get_trainer_program()
    exe.run(fluid.default_startup_program())
    manager = fluid.io.CheckpointManager(asked.checkpoints, program, every_steps=asked.every_steps, keep=10)
    found = manager.restore()
    begin = found.step if found else 0
    print("from", begin, None if found is None else found.position, flush=True)
    last = asked.short if asked.index == 1 and asked.short >= 0 else asked.steps
    for step in range(begin, last):
        feed = nccl2_job.share(nccl2_job.batch(step, ROWS), asked.index, asked.trainers)
        exe.run(program, feed=feed, fetch_list=[loss])
        manager.step(position={"trainer": asked.index, "batch": step + 1})
        if asked.index == 0 and step + 1 == asked.die:
            manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    exe.close()


if __name__ == "__main__":
    main(sys.argv[1:])
