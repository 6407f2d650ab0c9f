"""A rank of a collective job that saves checkpoints, and goes on from what there is: `collective_job.py FOLDER …`.

It leaves its variables in FOLDER/rank<i>.npz when its steps are over.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.distributed import nccl2_job

import penstock as fluid
from penstock.distributed import collective

ROWS = 12


def options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every_steps", type=int)
    parser.add_argument("--every_s", type=float)
    parser.add_argument("--die", type=int, default=-1, help="rank 1 kills itself after so many steps")
    parser.add_argument("--short", type=int, nargs="*", default=[], help="ranks have data for so many steps only")
    parser.add_argument("--passes", type=int, default=0, help="over the data, with a join after each")
    parser.add_argument("--leaves", action="store_true", help="rank 1 ends without a close")
    parser.add_argument("--executor", action="store_true", help="by a plain Executor")
    return parser.parse_args(arguments)


def train(asked: argparse.Namespace, rank: int, endpoints: list[str]) -> None:
    """Train from what there is to the last step."""
    mode = "grad_allreduce" if asked.executor else "nccl2"
    told = nccl2_job.options([str(asked.folder), "--dropout", "0.3", "--optimizer", "adam", "--mode", mode])
    loss, exe = nccl2_job.prepared(told, rank, endpoints)
    parallel = None
    if len(endpoints) > 1 and not asked.executor:
        parallel = fluid.ParallelExecutor(False, loss_name=loss.name, num_trainers=len(endpoints), trainer_id=rank)
    manager = fluid.io.CheckpointManager(
        asked.checkpoints, every_steps=asked.every_steps, every_s=asked.every_s, keep=9
    )
    found = manager.restore()
    begin = found.step if found else 0
    if found and len(found.positions) == len(endpoints):
        assert found.position == {"rank": rank, "batch": begin}, found
    print("from", begin, flush=True)
    last = asked.short[rank] if rank < len(asked.short) else asked.steps
    passes = found.passes if found else 0

    def train_one(step: int) -> None:
        feed = nccl2_job.share(nccl2_job.batch(step, ROWS), rank, len(endpoints))
        exe.run(feed=feed, fetch_list=[loss]) if parallel is None else parallel.run([loss], feed)
        manager.step(position={"rank": rank, "batch": step + 1}, metric=1 / (step + 1))
        if rank == 1 and step + 1 == asked.die:
            os.kill(os.getpid(), signal.SIGKILL)

    for number in range(passes, asked.passes or passes + 1):
        for step in range(begin, last):
            train_one(step)
        if asked.passes:
            manager.pass_ended()
            collective.join()
            print("pass", number, "over after", manager.num_steps, flush=True)
    if not (asked.leaves and rank == 1):
        manager.close()
    if not asked.leaves:
        collective.join()
    scope = fluid.global_scope()
    values: Any = {n: np.array(scope.find_var(n)) for n in scope.names()}
    np.savez(asked.folder / f"rank{rank}.npz", **values)


if __name__ == "__main__":
    train(
        options(sys.argv[1:]),
        int(os.environ["PADDLE_TRAINER_ID"]),
        os.environ["PADDLE_TRAINER_ENDPOINTS"].split(","),
    )
