"""A rank that makes two passes over data of its own, of another size than the others': `… FOLDER CHECKPOINTS`.

It leaves its variables in FOLDER/rank<i>.npz. FOLDER/part-<i> holds its samples (tests/distributed/dataset_job.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.distributed.dataset_job import loaded, met

import penstock as fluid


def main(folder: Path, checkpoints: Path) -> None:
    """Train from what there is to the end of both passes."""
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    exe, inputs = met(rank, os.environ["PADDLE_TRAINER_ENDPOINTS"].split(","))
    dataset = loaded(folder, rank, inputs)
    with fluid.io.CheckpointManager(checkpoints, every_steps=3, keep=9) as manager:
        start = manager.restore(dataset=dataset)
        print("from", start.step if start else 0, flush=True)
        for number in range(start.passes if start else 0, 2):
            dataset.local_shuffle(seed=number)
            exe.train_from_dataset(fluid.default_main_program(), dataset, checkpoints=manager)
        print("steps", manager.num_steps, flush=True)
    scope = fluid.global_scope()
    values: Any = {name: np.array(scope.find_var(name)) for name in scope.names()}
    np.savez(folder / f"rank{rank}.npz", **values)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
