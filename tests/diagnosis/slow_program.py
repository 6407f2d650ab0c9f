"""A training program with one cause built in that makes it slow. It trains until it is ended.

In a job with parameter servers it is a fleet program (sync); else it trains on one machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import (
    DistributedStrategyFactory,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--words", type=int, default=0, help="rows of a sparse table")
    parser.add_argument("--read-ms", type=float, default=0.0, help="that the reader needs for a batch")
    parser.add_argument("--slow-reader-of", type=int, default=-1, help="the only trainer whose reader needs that")
    return parser.parse_args()


def network(args: argparse.Namespace) -> Any:
    x = fluid.layers.data(name="x", shape=[args.width], dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    hidden = x
    if args.words:
        word = fluid.layers.data(name="word", shape=[1], dtype="int64")
        table = fluid.layers.embedding(input=word, size=[args.words, 64], is_sparse=True, param_attr="table")
        hidden = fluid.layers.concat([x, table], axis=1)
    for _ in range(args.layers):
        hidden = fluid.layers.fc(hidden, size=args.width, act="relu")
    return fluid.layers.mean(fluid.layers.square_error_cost(input=fluid.layers.fc(hidden, size=1), label=y))


def batches(args: argparse.Namespace, trainer: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(trainer)
    fed = {"x": rng.standard_normal((args.rows, args.width)).astype("float32"),
           "y": rng.standard_normal((args.rows, 1)).astype("float32")}  # fmt: skip
    if args.words:
        fed["word"] = rng.integers(0, args.words, (args.rows, 1))
    while True:
        if args.slow_reader_of in (-1, trainer):
            time.sleep(args.read_ms / 1e3)
        yield fed


def threads(args: argparse.Namespace) -> fluid.ExecutionStrategy:
    strategy = fluid.ExecutionStrategy()
    strategy.num_threads = args.threads
    return strategy


def run_here(args: argparse.Namespace) -> None:
    loss = network(args)
    fluid.optimizer.SGD(1e-4).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    program = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(
        loss_name=loss.name, exec_strategy=threads(args)
    )
    for fed in batches(args, 0):
        exe.run(program, feed=fed, fetch_list=[loss])


def run_with_servers(args: argparse.Namespace) -> None:
    loss = network(args)
    strategy = DistributedStrategyFactory.create_sync_strategy()
    fleet.init(role_maker.PaddleCloudRoleMaker())
    fleet.distributed_optimizer(fluid.optimizer.SGD(1e-4), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    exe.run(fleet.startup_program)
    program = fluid.CompiledProgram(fleet.main_program).with_data_parallel(
        loss_name=loss.name, build_strategy=strategy.get_build_strategy(), exec_strategy=threads(args)
    )
    for fed in batches(args, fleet.worker_index()):
        exe.run(program, feed=fed, fetch_list=[loss])


if __name__ == "__main__":
    given = parse()
    if os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST"):
        run_with_servers(given)
    else:
        run_here(given)
