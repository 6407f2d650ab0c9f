"""A job that saves checkpoints as its description says; its first attempt kills itself after five steps."""

from __future__ import annotations

import os
import signal

import numpy as np

import penstock as fluid


def main() -> None:
    """Train to the eighth step."""
    main, startup = fluid.Program(seed=3), fluid.Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.dropout(fluid.layers.fc(x, 8), 0.5))
        fluid.optimizer.Adam(0.1).minimize(loss)
    exe = fluid.Executor()
    exe.run(startup)
    manager = fluid.io.CheckpointManager(program=main)
    found = manager.restore()
    begin = found.step if found else 0
    print(f"from {begin}", flush=True)
    for step in range(begin, 8):
        exe.run(main, {"x": np.random.default_rng(step).normal(size=(6, 4)).astype("float32")}, [loss])
        manager.step()
        if found is None and step == 4:
            manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    print(f"kept {sorted(path.name for path in manager.directory.glob('checkpoint.*'))}", flush=True)


if __name__ == "__main__":
    main()
