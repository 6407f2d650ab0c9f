"""A process of a job under test that saves checkpoints, by Penstock's own manager, as the job's description says.

    python -m tools.chaos.checkpointing WITNESS STEPS PAUSE_S

makes steps until STEPS, from the checkpoint that is restored if there is one, and prints a numbered line for each. In
its witness file (`counting`) `restored N` and `committed N` stand for checkpoints of step N: committed ones were opened
again, and every byte checked; `damaged N` stands for one that was not whole.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from tools.chaos.counting import note, wait

import penstock as fluid
from penstock.errors import PenstockError
from penstock.io.checkpoints.reading import opened


def main(argv: list[str]) -> int:
    """Train. Returns the exit status."""
    folder, steps, pause_s = Path(argv[0]), int(argv[1]), float(argv[2])
    name = f"{os.environ['PENSTOCK_REPLICA_ID']}.{os.getpid()}"
    witness = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    note(witness, "began", 0)
    program, startup = fluid.Program(seed=3), fluid.Program(seed=3)
    with fluid.program_guard(program, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.fc(x, 8))
        fluid.optimizer.Adam(0.1).minimize(loss)
    executor = fluid.Executor()
    executor.run(startup)
    with fluid.io.CheckpointManager(program=program) as manager:
        found = manager.restore()
        if found is not None:
            note(witness, "restored", found.step)
        begin = found.step if found is not None else 0
        for number, step in enumerate(range(begin, steps)):
            executor.run(program, {"x": np.full((6, 4), step, dtype=np.float32)}, [loss])
            if manager.step():
                manager.wait()
                note(witness, *judged(manager.directory, step + 1))
            print(number, flush=True)
            note(witness, "wrote", number + 1)
            wait(witness, pause_s)
    return 0


def judged(folder: Path, step: int) -> tuple[str, int]:
    """Return what is to be noted of the checkpoint of a step that was committed just now."""
    [path] = folder.glob(f"checkpoint.*.{step:012d}")
    try:
        opened(path)
    except PenstockError:
        return "damaged", step
    return "committed", step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
