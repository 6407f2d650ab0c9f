"""The fleet script of Fluid's CPU training manual, completed where lines were lost, on a small regression in float64.

    python -m penstock.distributed.launch_ps --server_num 2 --worker_num 2 fit_a_line.py --mode sync --out FOLDER

Trainer i of n gets the i-th of n equal parts of each batch; with --local one process gets the whole. Trainer 0 leaves
losses and parameters in FOLDER, and how many losses all workers had, with their sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import (
    DistributedStrategyFactory,
)

BATCH, FEATURES, WORDS = 32, 200, 50


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sync", "half_async", "async", "geo"], default="sync")
    parser.add_argument("--optimizer", choices=["SGD", "Momentum", "Adam"], default="SGD")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--geo_every", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--save", action="store_true", help="save_persistables and an inference model at the end")
    parser.add_argument("--load", type=Path, help="folder of an earlier save")
    parser.add_argument("--first_step", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def network() -> tuple[Any, Any]:
    """Return (loss, prediction): two layers on numbers and an embedding of words."""
    fluid.default_main_program().random_seed = fluid.default_startup_program().random_seed = 7
    x = fluid.layers.data(name="x", shape=[FEATURES], dtype="float64")
    word = fluid.layers.data(name="word", shape=[1], dtype="int64")
    y = fluid.layers.data(name="y", shape=[1], dtype="float64")
    emb = fluid.layers.embedding(input=word, size=[WORDS, 8], is_sparse=True, dtype="float64", param_attr="emb")
    hidden = fluid.layers.fc(fluid.layers.concat([x, emb], axis=1), size=100, act="tanh")
    predict = fluid.layers.fc(hidden, size=1)
    return fluid.layers.mean(fluid.layers.square_error_cost(input=predict, label=y)), predict


def batch(step: int, part: int, num_parts: int) -> dict[str, Any]:
    """Return part `part` of a batch that `step` decides."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal((BATCH, FEATURES))
    word = rng.integers(0, WORDS, (BATCH, 1))
    y = x[:, :3].sum(1, keepdims=True) + 0.1 * word
    each = BATCH // num_parts
    mine = slice(part * each, (part + 1) * each)
    return {"x": x[mine], "word": word[mine], "y": y[mine]}


def optimizer_of(args: argparse.Namespace) -> Any:
    if args.optimizer == "Momentum":
        return fluid.optimizer.Momentum(args.learning_rate, 0.9)
    return getattr(fluid.optimizer, args.optimizer)(args.learning_rate)


def train(args: argparse.Namespace, exe: fluid.Executor, program: Any, loss: Any, part: int, num_parts: int) -> Any:
    losses = []
    for step in range(args.first_step, args.first_step + args.steps):
        (found,) = exe.run(program, feed=batch(step, part, num_parts), fetch_list=[loss])
        losses.append(float(np.mean(found)))
    return losses


def write(args: argparse.Namespace, names: list[str], losses: list[float], whole: Any = ()) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    found = {name: fluid.global_scope().find(name) for name in names}
    np.savez(
        args.out / "result.npz", losses=losses, whole=whole, **{n: v.numpy() for n, v in found.items() if v is not None}
    )


def run_local(args: argparse.Namespace) -> None:
    loss, _ = network()
    optimizer_of(args).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    losses = train(args, exe, fluid.default_main_program(), loss, 0, 1)
    write(args, [p.name for p in fluid.default_main_program().all_parameters()], losses)


def strategy_of(args: argparse.Namespace) -> Any:
    strategy: Any
    if args.mode == "sync":
        # Sync
        strategy = DistributedStrategyFactory.create_sync_strategy()
    elif args.mode == "half_async":
        # Half-Async
        strategy = DistributedStrategyFactory.create_half_async_strategy()
    elif args.mode == "async":
        # Async
        strategy = DistributedStrategyFactory.create_async_strategy()
    else:
        strategy = DistributedStrategyFactory.create_geo_strategy(update_frequency=args.geo_every)
    return strategy


def run_distributed(args: argparse.Namespace) -> None:
    loss, predict = network()
    names = [p.name for p in fluid.default_main_program().all_parameters()]

    # step1: get distributed strategy
    strategy = strategy_of(args)
    # small blocks, so that the layers are cut over both servers
    strategy.set_program_config({"min_block_size": 8192})

    # step2: define role of node
    role = role_maker.PaddleCloudRoleMaker()
    fleet.init(role)

    # step3: get distributed training program
    optimizer = optimizer_of(args)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    optimizer.minimize(loss)

    # step4.1: run parameter server node
    if fleet.is_server():
        fleet.init_server(args.load)
        fleet.run_server()
    # step4.2: run worker node
    elif fleet.is_worker():
        exe = fluid.Executor(fluid.CPUPlace())
        fleet.init_worker()
        exe.run(fleet.startup_program)
        program: Any = fleet.main_program
        if args.compiled:
            compiled_program = fluid.compiler.CompiledProgram(fleet.main_program).with_data_parallel(
                loss_name=loss.name,
                build_strategy=strategy.get_build_strategy(),
                exec_strategy=strategy.get_execute_strategy(),
            )
            program = compiled_program
        losses = train(args, exe, program, loss, fleet.worker_index(), fleet.worker_num())
        whole = np.zeros(2)
        fleet.all_reduce_worker(np.array([len(losses), sum(losses)]), whole)
        fleet.barrier_worker()
        if args.save:
            fleet.save_persistables(exe, args.out / "persistables")
            fleet.save_inference_model(exe, args.out / "model", ["x", "word"], [predict])
        if fleet.is_first_worker():
            write(args, names, losses, whole)
        fleet.stop_worker()


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.local:
        run_local(args)
    else:
        run_distributed(args)


if __name__ == "__main__":
    main()
