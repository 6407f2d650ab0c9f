"""CTR-DNN on real flights with parameter servers: the fleet script of Fluid's CPU training manual.

    CPU_NUM=1 python -m penstock.distributed.launch_ps --server_num 2 --worker_num 2 train_fleet.py --mode geo

Every process runs this script; what it does follows from the role that its environment gives it. Each trainer reads its
own part of the rows. At the end worker 0 scores the flights that were held back with the parameters that the servers
have; its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

import flights_data
import flights_model
import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
from flights_data import Flights, Split
from penstock import telemetry
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import (
    DistributedStrategyFactory,
)
from train import TEST_BATCH_SIZE, area_under_curve

FETCH_EVERY = 10  # steps; a fetch waits for the step to end
MODES = ("sync", "half_async", "async", "geo")
WIRE_DTYPES = ("float32", "float16", "bfloat16")


def strategy_of(mode: str, update_frequency: int) -> Any:
    """Return the strategy that the manual makes for a mode."""
    if mode == "geo":
        return DistributedStrategyFactory.create_geo_strategy(update_frequency=update_frequency)
    return getattr(DistributedStrategyFactory, f"create_{mode}_strategy")()


def my_batches(train: Split, args: argparse.Namespace, pass_index: int) -> Iterator[Split]:
    """Yield this worker's part of each batch of the job: all workers' parts together are one batch of one machine."""
    index, count = fleet.worker_index(), fleet.worker_num()
    for batch in flights_data.batches(train, args.batch_size * count, seed=args.seed, pass_index=pass_index):
        each = batch.num_rows // count
        if each:
            yield batch.take(slice(index * each, (index + 1) * each))


def steps_of_a_pass(train: Split, args: argparse.Namespace) -> int:
    """Return how many of the job's batches are large enough for every worker to have a part."""
    whole, rest = divmod(train.num_rows, args.batch_size * fleet.worker_num())
    found = int(whole + (rest >= fleet.worker_num()))
    return min(found, int(args.steps)) if args.steps else found


def score(exe: fluid.Executor, network: flights_model.Network, test: Split) -> float:
    """Return the AUC of the model that worker 0 saves, as a service would load it."""
    with tempfile.TemporaryDirectory() as folder:
        names = [*flights_data.CATEGORICAL, flights_model.NUMERIC_FEED]
        fleet.save_inference_model(exe, folder, names, [network.predict])
        scope = fluid.Scope()
        program, feeds, fetches = fluid.io.load_inference_model(folder, exe, scope=scope)
        scores = []
        for batch in flights_data.in_order(test, TEST_BATCH_SIZE):
            fed = {name: value for name, value in flights_model.feed(batch).items() if name in feeds}
            (found,) = fluid.Executor(fluid.CPUPlace()).run(program, fed, fetches, scope=scope)
            scores.append(np.asarray(found)[:, 1])
    return area_under_curve(test.label, np.concatenate(scores))


def work(args: argparse.Namespace, flights: Flights, network: flights_model.Network, strategy: Any) -> None:
    """Train as one worker, and score as the first one."""
    exe = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    exe.run(fleet.startup_program)
    compiled_program = fluid.compiler.CompiledProgram(fleet.main_program).with_data_parallel(
        loss_name=network.loss,
        build_strategy=strategy.get_build_strategy(),
        exec_strategy=strategy.get_execute_strategy(),
    )
    steps, num_steps = 0, args.passes * steps_of_a_pass(flights.train, args)
    for pass_index in range(args.passes):
        batches = my_batches(flights.train, args, pass_index)
        for batch in itertools.islice(batches, args.steps or None):
            steps += 1
            wanted = [network.loss] if steps % FETCH_EVERY == 0 or steps == num_steps else []
            exe.run(compiled_program, feed=flights_model.feed(batch), fetch_list=wanted)
            if wanted:
                telemetry.progress(steps, num_steps)
    if fleet.is_first_worker():
        auc = score(exe, network, flights.test)
        telemetry.log(test_auc=auc)
        print(json.dumps({"mode": args.mode, "steps": steps, "auc": round(auc, 4)}))
    fleet.stop_worker()


def main() -> None:
    """Do what this process's role asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--update_frequency", type=int, default=20, help="GEO: batches between two exchanges")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="stop each pass after so many steps of the job")
    parser.add_argument("--batch_size", type=int, default=512, help="rows of one worker's step")
    parser.add_argument("--wire_dtype", choices=WIRE_DTYPES, default="float32", help="of gradients over a network")
    parser.add_argument("--learning_rate", type=float, default=flights_model.LEARNING_RATE)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    flights = flights_data.load()
    # step1: get distributed strategy
    strategy = strategy_of(args.mode, args.update_frequency)
    strategy.get_program_config().wire_dtype = args.wire_dtype
    # step2: define role of node
    role = role_maker.PaddleCloudRoleMaker()
    fleet.init(role)
    # step3: get distributed training program
    optimizer = fluid.optimizer.Adam(args.learning_rate)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    network = flights_model.build(flights.vocabulary_sizes, seed=args.seed, optimizer=optimizer)
    # step4.1: run parameter server node
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    # step4.2: run worker node
    elif fleet.is_worker():
        work(args, flights, network, strategy)


if __name__ == "__main__":
    main()
