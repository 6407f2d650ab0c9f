"""A trainer of a collective job, in the words of the manual's "Training Using NCCL2 Communication".

`nccl2_job.py FOLDER [options]`: reads who it is from a launcher's variables, trains on its share of the rows, and
leaves its parameters and what it fetched in FOLDER. One trainer alone trains on the whole batches.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as fluid
from penstock.distributed import collective
from penstock.errors import ProgramError
from penstock.incubate.fleet.base.role_maker import UserDefinedCollectiveRoleMaker
from penstock.incubate.fleet.collective import DistributedStrategy, fleet

FEATURES, IDS, WIDTH = 6, 50, 4
_MEAN_LR = 0.1


def network(*, sparse: bool, dropout: float, wide: int = 0) -> Any:
    """Record a small model in float64; return its loss."""
    x = fluid.layers.data(name="x", shape=[FEATURES], dtype="float64")
    y = fluid.layers.data(name="y", shape=[1], dtype="float64")
    hidden: Any = fluid.layers.fc(input=x, size=8, act="relu")
    if wide:  # a gradient of wide * wide elements
        hidden = fluid.layers.fc(input=fluid.layers.fc(input=hidden, size=wide, act="tanh"), size=wide, act="tanh")
    if sparse:
        ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
        rows = fluid.layers.embedding(input=ids, size=[IDS, WIDTH], is_sparse=True, dtype="float64")
        hidden = fluid.layers.concat([hidden, rows.reshape(-1, WIDTH)], axis=1)
    if dropout:
        hidden = fluid.layers.dropout(hidden, dropout)
    prediction = fluid.layers.fc(input=hidden, size=1)
    return fluid.layers.mean(fluid.layers.square_error_cost(input=prediction, label=y))


def optimizer(name: str) -> Any:
    """Make the optimizer; Adam's rate falls as steps go by."""
    if name == "sgd":
        return fluid.optimizer.SGD(learning_rate=_MEAN_LR)
    rate = fluid.layers.exponential_decay(0.01, decay_steps=3, decay_rate=0.9)
    return fluid.optimizer.Adam(learning_rate=rate)


def batch(step: int, rows: int) -> dict[str, np.ndarray]:
    """Return the whole batch of a step."""
    drawn = np.random.default_rng(step)
    x = drawn.normal(size=(rows, FEATURES))
    ids = drawn.integers(0, IDS, size=(rows, 1))
    return {"x": x, "y": x.sum(1, keepdims=True) + 0.1 * ids, "ids": ids}


def share(whole: dict[str, np.ndarray], rank: int, ranks: int) -> dict[str, np.ndarray]:
    """Return the rows of a rank: equally many, or the last one has what is left."""
    size = len(whole["x"])
    return {n: v[rank * size // ranks : (rank + 1) * size // ranks] for n, v in whole.items()}


def options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[4], help="of every rank, or of each")
    parser.add_argument("--rows", type=int, default=12, help="of the whole batch")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--mode", default="nccl2", help="nccl2, grad_allreduce, local_sgd")
    parser.add_argument("--reduce", action="store_true")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--wide", type=int, default=0)
    parser.add_argument("--rings", type=int, default=1)
    parser.add_argument("--inter", type=int, default=0)
    parser.add_argument("--width", type=int, default=0, help="of one rank's own network: another program")
    parser.add_argument("--fail", type=int, default=-1, help="raise before this step")
    parser.add_argument("--stuck", action="store_true", help="fail when taking part without rows")
    parser.add_argument("--join", action="store_true")
    parser.add_argument("--fleet", action="store_true", help="distribute the program by the collective fleet")
    parser.add_argument("--count-workers", action="store_true", help="print at the end how many workers Gloo has")
    parser.add_argument("--no-mapping", action="store_true", help="fail to map the memory of a ring")
    return parser.parse_args(arguments)


def prepared(asked: argparse.Namespace, trainer_id: int, endpoints: list[str]) -> tuple[Any, fluid.Executor]:
    """Record, transpile, and run the startup program; return the loss."""
    if asked.no_mapping:
        setattr(torch.ops.penstock, "ring_open", no_mapping)  # noqa: B010 - a namespace that mypy knows no names of
    fluid.default_startup_program().random_seed = 1 + trainer_id  # the first one's values count
    fluid.default_main_program().random_seed = 5
    loss = network(sparse=not asked.dense, dropout=asked.dropout, wide=asked.wide)
    if asked.width:
        loss = loss + fluid.layers.mean(fluid.layers.fc(input=loss.reshape(1, 1), size=asked.width))
    if asked.fleet and len(endpoints) > 1:
        fleet.init(UserDefinedCollectiveRoleMaker(trainer_id, endpoints))
        fleet.distributed_optimizer(optimizer(asked.optimizer), fleet_strategy(asked)).minimize(loss)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(fleet.startup_program)
        return loss, exe
    optimizer(asked.optimizer).minimize(loss)
    if len(endpoints) > 1:
        config = fluid.DistributeTranspilerConfig()
        config.mode = "nccl2" if asked.mode == "nccl2" else "collective"
        if asked.mode != "nccl2":
            config.collective_mode = asked.mode
        config.nccl_comm_num = asked.rings
        if asked.inter:
            config.use_hierarchical_allreduce = True
            config.hierarchical_allreduce_inter_nranks = asked.inter
        t = fluid.DistributeTranspiler(config=config)
        trainers = ",".join(endpoints)
        current_endpoint = endpoints[trainer_id]
        t.transpile(trainer_id, trainers=trainers, current_endpoint=current_endpoint)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    return loss, exe


def fleet_strategy(asked: argparse.Namespace) -> DistributedStrategy:
    """Return the options as fleet's strategy."""
    strategy = DistributedStrategy()
    strategy.nccl_comm_num, strategy.use_local_sgd = asked.rings, asked.mode == "local_sgd"
    strategy._ut4grad_allreduce = asked.mode == "grad_allreduce"
    if asked.reduce:
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    return strategy


def runner(
    asked: argparse.Namespace, loss: Any, exe: fluid.Executor, rank: int, endpoints: list[str]
) -> Callable[[Any], Any]:
    """Return what runs a step on a feed."""
    if asked.fleet and len(endpoints) > 1:
        return lambda feed: exe.run(fleet.main_program, feed, [loss])
    if asked.mode != "nccl2":
        return lambda feed: exe.run(feed=feed, fetch_list=[loss])
    strategy = fluid.BuildStrategy()
    if asked.reduce:
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    executor = fluid.ParallelExecutor(
        asked.cuda, loss_name=loss.name, build_strategy=strategy, num_trainers=len(endpoints), trainer_id=rank
    )
    return lambda feed: executor.run([loss], feed)


def cannot(step: object) -> None:
    """Take part without rows, in vain."""
    raise ProgramError("this rank was told not to take part without rows")


def no_mapping(*_: object) -> None:
    """Fail as the operator does where address space is short."""
    raise RuntimeError("the memory of a ring cannot be mapped: Cannot allocate memory")


def count_gloo_workers() -> None:
    """Print how many of Gloo's workers there are."""
    names = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
    print("Gloo workers", sum(name.startswith("pt_gloo") for name in names), flush=True)


def main(arguments: list[str]) -> None:
    """Train."""
    asked = options(arguments)
    if asked.count_workers:
        atexit.register(count_gloo_workers)  # first, so called last
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    endpoints = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    loss, exe = prepared(asked, rank, endpoints)
    run = runner(asked, loss, exe, rank, endpoints)
    steps = asked.steps[rank] if len(asked.steps) > 1 else asked.steps[0]
    for step in range(steps):
        if step == asked.fail:
            raise ValueError("this rank was told to fail")
        feed = share(batch(step, asked.rows), rank, len(endpoints))
        if asked.dense:
            del feed["ids"]
        print(step, float(np.mean(run(feed)[0])), flush=True)
    if asked.stuck:
        group: Any = collective.this_process.group
        group._steppers = dict.fromkeys(group._steppers, cannot)
    if asked.join:
        collective.join()
    if asked.wide and len(endpoints) > 1:
        met: Any = collective.this_process.group
        if met.kind == "ring":
            print("in place", sum(torch.ops.penstock.ring_num_in_place(ring) for ring in met.rings), flush=True)
    scope = fluid.global_scope()
    values: Any = {n: np.array(scope.find_var(n)) for n in scope.names()}  # on CPU, wherever they lie
    np.savez(asked.folder / f"rank{rank}.npz", **values)


if __name__ == "__main__":
    main(sys.argv[1:])
