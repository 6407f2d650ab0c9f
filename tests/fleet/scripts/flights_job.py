"""The transpiler script and the fleet script of Fluid's manuals, completed where lines were lost, on the flights model.

    python -m penstock.distributed.launch_ps --server_num 2 --worker_num 2 flights_job.py --script fleet --out FILE

Trainer i of n gets the i-th of n equal parts of each batch of the whole job; a process that no launcher started trains
alone, with the whole. When the others have left, trainer 0 leaves in FILE the parameters that the servers have and the
AUC on the flights that were held back.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flights_data
import flights_model
import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
import train
from penstock.fleet import saving
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import (
    DistributedStrategyFactory,
)
from penstock.ps.communicator import descriptor_of, remotes
from penstock.transpile.remote_variables import remote_variables

Values = dict[str, Any]
SEED, BATCH = 7, 1000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", choices=["transpiler", "fleet"], default="fleet")
    parser.add_argument("--mode", choices=["sync", "half_async", "async", "geo"], default="sync")
    parser.add_argument("--optimizer", choices=["SGD", "Momentum", "Adam"], default="Adam")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of the job, in each pass; default: all")
    parser.add_argument("--geo_every", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def optimizer_of(args: argparse.Namespace) -> Any:
    if args.optimizer == "Momentum":
        return fluid.optimizer.Momentum(0.05, 0.9)
    return {"SGD": fluid.optimizer.SGD, "Adam": fluid.optimizer.Adam}[args.optimizer](
        {"SGD": 0.1, "Adam": flights_model.LEARNING_RATE}[args.optimizer]
    )


def run_steps(run: Callable[[Values], object], args: argparse.Namespace, part: int, num_parts: int) -> None:
    """Train on this trainer's part of each batch."""
    rows = flights_data.load().train
    for pass_index in range(args.passes):
        batches = flights_data.batches(rows, BATCH, seed=SEED, pass_index=pass_index)
        for batch in itertools.islice(batches, args.steps):
            each = batch.num_rows // num_parts
            run(fed(batch.take(slice(part * each, (part + 1) * each)), args))


def fed(batch: flights_data.Split, args: argparse.Namespace) -> Values:
    feed = flights_model.feed(batch)
    return {**feed, flights_model.NUMERIC_FEED: feed[flights_model.NUMERIC_FEED].astype(args.dtype)}


def has_left(args: argparse.Namespace, trainer: int) -> Path:
    """Return the file that says so."""
    out: Path = args.out
    return out.with_suffix(f".{trainer}.left")


def wait_for_others(args: argparse.Namespace, trainers: int) -> None:
    """Wait until what the other trainers did has reached the servers."""
    while not all(has_left(args, trainer).exists() for trainer in range(1, trainers)):
        time.sleep(0.05)


def of_servers(program: Any, startup: Any, origin: Any) -> Values:
    """Return all parameters as the servers have them."""
    client = remotes.client(str(descriptor_of(program)))
    found = {v.name: saving.pulled(client, v, origin).numpy() for v in remote_variables([program, startup])}
    return {p.name: found[p.name] for p in origin.all_parameters()}


def write(args: argparse.Namespace, parameters: Values, network: flights_model.Network) -> None:
    """Score the flights that were held back, and leave the result."""
    scope, exe, scores = fluid.Scope(), fluid.Executor(fluid.CPUPlace()), []
    exe.run(network.startup, scope=scope)
    for name, value in parameters.items():
        scope.set(name, torch.from_numpy(value))
    test = flights_data.load().test
    for batch in flights_data.in_order(test, train.TEST_BATCH_SIZE):
        (found,) = exe.run(network.test, fed(batch, args), [network.predict], scope=scope)
        scores.append(np.asarray(found, dtype=np.float32)[:, 1])
    np.savez(args.out, auc=train.area_under_curve(test.label, np.concatenate(scores)), **parameters)


# -- the three ways ----------------------------------------------------------------------------------


def alone(args: argparse.Namespace, network: flights_model.Network) -> None:
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(network.startup)
    run_steps(lambda feed: exe.run(network.main, feed=feed, fetch_list=[]), args, 0, 1)
    found = {p.name: fluid.global_scope().find(p.name) for p in network.main.all_parameters()}
    write(args, {name: value.detach().numpy() for name, value in found.items() if value is not None}, network)


def by_transpiler(args: argparse.Namespace, network: flights_model.Network, local: flights_model.Network) -> None:
    role = os.environ["TRAINING_ROLE"]
    pserver_endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"]
    trainers, trainer_id = int(os.environ["PADDLE_TRAINERS_NUM"]), int(os.environ.get("PADDLE_TRAINER_ID", "0"))

    config = fluid.DistributeTranspilerConfig()
    config.half_async, config.geo_sgd_mode = args.mode == "half_async", args.mode == "geo"
    config.geo_sgd_need_push_nums = args.geo_every
    t = fluid.DistributeTranspiler(config=config)
    t.transpile(
        trainer_id,
        program=network.main,
        startup_program=network.startup,
        pservers=pserver_endpoints,
        trainers=trainers,
        sync_mode=args.mode == "sync",
    )
    exe = fluid.Executor(fluid.CPUPlace())
    if role == "PSERVER":
        current_endpoint = f"{os.environ['POD_IP']}:{os.environ['PADDLE_PORT']}"
        pserver_prog = t.get_pserver_program(current_endpoint)
        pserver_startup = t.get_startup_program(current_endpoint, pserver_prog)
        exe.run(pserver_startup)
        exe.run(pserver_prog)
        return
    exe.run(network.startup)
    trainer_prog = t.get_trainer_program()
    run_steps(lambda feed: exe.run(trainer_prog, feed=feed, fetch_list=[]), args, trainer_id, trainers)
    if trainer_id == 0:
        wait_for_others(args, trainers)
        write(args, of_servers(trainer_prog, network.startup, local.main), local)
    exe.close()
    has_left(args, trainer_id).touch()


def by_fleet(args: argparse.Namespace, network: flights_model.Network, local: flights_model.Network) -> None:
    exe = fluid.Executor(fluid.CPUPlace())
    # step4.1: run parameter server node
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    # step4.2: run worker node
    elif fleet.is_worker():
        fleet.init_worker()
        exe.run(fleet.startup_program)
        strategy = fleet_strategy(args)
        compiled_prog = fluid.compiler.CompiledProgram(fleet.main_program).with_data_parallel(
            loss_name=network.loss,
            build_strategy=strategy.get_build_strategy(),
            exec_strategy=strategy.get_execute_strategy(),
        )
        run_steps(
            lambda feed: exe.run(compiled_prog, feed=feed, fetch_list=[]),
            args,
            fleet.worker_index(),
            fleet.worker_num(),
        )
        if fleet.is_first_worker():
            wait_for_others(args, fleet.worker_num())
            write(args, of_servers(fleet.main_program, fleet.startup_program, local.main), local)
        fleet.stop_worker()
        has_left(args, fleet.worker_index()).touch()


def fleet_strategy(args: argparse.Namespace) -> Any:
    if args.mode == "geo":
        return DistributedStrategyFactory.create_geo_strategy(update_frequency=args.geo_every)
    return getattr(DistributedStrategyFactory, f"create_{args.mode}_strategy")()


def main() -> None:
    args = parse()
    sizes = flights_data.load().vocabulary_sizes

    def network(optimizer: Any) -> flights_model.Network:
        return flights_model.build(sizes, seed=SEED, optimizer=optimizer, dtype=args.dtype)

    if "TRAINING_ROLE" not in os.environ:
        alone(args, network(optimizer_of(args)))
    elif args.script == "transpiler":
        by_transpiler(args, network(optimizer_of(args)), network(optimizer_of(args)))
    else:
        # step1: get distributed strategy
        strategy = fleet_strategy(args)
        # step2: define role of node
        fleet.init(role_maker.PaddleCloudRoleMaker())
        # step3: get distributed training program
        optimizer = fleet.distributed_optimizer(optimizer_of(args), strategy)
        by_fleet(args, network(optimizer), network(optimizer_of(args)))


if __name__ == "__main__":
    main()
