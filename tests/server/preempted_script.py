"""A rank of a job that saves only when it is preempted: `preempted_script.py LINES LAST`.

It appends a line "epoch rank step" to LINES for each step that it has computed, before its manager hears of it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import penstock as fluid

STEP_S = 0.4
"""Of the first attempt: so that a test comes between two of its steps, on a machine that is busy too."""


def main(lines: Path, last: int) -> None:
    """Train to the last step."""
    rank, endpoints = int(os.environ["PADDLE_TRAINER_ID"]), os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    x = fluid.layers.data(name="x", shape=[4], dtype="float32")
    loss = fluid.layers.mean(fluid.layers.fc(x, 8))
    fluid.optimizer.Adam(0.1).minimize(loss)
    config = fluid.DistributeTranspilerConfig()
    config.mode, config.collective_mode = "collective", "grad_allreduce"
    transpiler = fluid.DistributeTranspiler(config=config)
    transpiler.transpile(rank, trainers=",".join(endpoints), current_endpoint=endpoints[rank])
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    with fluid.io.CheckpointManager() as manager:
        found = manager.restore()
        begin = found.step if found else 0
        for step in range(begin, last):
            drawn = np.random.default_rng([rank, step]).normal(size=(6, 4)).astype("float32")
            exe.run(feed={"x": drawn}, fetch_list=[loss])
            with lines.open("a") as file:
                file.write(f"{os.environ['PENSTOCK_EPOCH']} {rank} {step + 1}\n")
            manager.step(position={"rank": rank})
            if begin == 0:
                time.sleep(STEP_S)
    print(f"came to {manager.num_steps} from {begin}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
