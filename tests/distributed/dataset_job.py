"""A trainer of a job that reads its own file of numbers: `dataset_job.py FOLDER WHAT NUMBER`.

WHAT is `shuffle` (a global shuffle; NUMBER: seed) or `train` (a pass with a fixed number of batches, or with
complements; NUMBER: how many). Each trainer leaves in FOLDER what it has found. A launcher's variables say whether it
trains with others collectively, or with parameter servers, or is one of these.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid
from penstock.dataset.slots import feed_of
from penstock.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import StrategyFactory


def recorded() -> tuple[list[Any], Any]:
    """Record a model of a number and some words. Return its inputs and its loss."""
    fluid.default_startup_program().random_seed = fluid.default_main_program().random_seed = 5
    number = fluid.layers.data("number", [1])
    words = fluid.layers.data("words", [-1, -1], dtype="int64", lod_level=1)
    embedded: Any = fluid.layers.embedding(words, size=[10, 4], is_sparse=True)
    predict = fluid.layers.fc(fluid.layers.concat([number, fluid.layers.sequence_pool(embedded, "sum")], 1), 1)
    return [number, words], fluid.layers.mean(fluid.layers.square(predict))


def met(rank: int, endpoints: list[str]) -> tuple[Any, list[Any]]:
    """Meet the others of a collective job. Return executor and inputs."""
    inputs, loss = recorded()
    fluid.optimizer.SGD(1e-6).minimize(loss)
    config = fluid.DistributeTranspilerConfig()
    config.mode, config.collective_mode = "collective", "grad_allreduce"
    t = fluid.DistributeTranspiler(config=config)
    t.transpile(rank, trainers=",".join(endpoints), current_endpoint=endpoints[rank])
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    return exe, inputs


def loaded(folder: Path, rank: int, inputs: list[Any]) -> Any:
    """Return this trainer's samples, in memory."""
    dataset: Any = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var(inputs)
    dataset.set_batch_size(4)
    dataset.set_filelist([str(folder / f"part-{rank}")])
    dataset.set_fleet_send_batch_size(7)
    dataset.load_into_memory()
    return dataset


def seen(dataset: Any) -> list[list[Any]]:
    """Return all samples, in order: number and words."""
    found = []
    run = dataset.open()
    while (batch := run.take()) is not None:
        feed = feed_of(batch, run.slots, {"number", "words", "words@LENGTHS"})
        for number, words, length in zip(*(feed[n].tolist() for n in feed), strict=True):
            found.append([int(number[0]), *words[: length[0]]])
        run.used(batch)
    run.close()
    return found


def shuffled(dataset: Any, seed: int, fleet: Any = None) -> Any:
    """Shuffle, twice, and from a position; return what is seen."""
    dataset.global_shuffle(fleet, seed=seed)
    once = seen(dataset)
    position = dataset.position()
    dataset.global_shuffle(fleet, seed=seed + 1)
    twice = seen(dataset)
    within = dataset.position()
    dataset.load_into_memory()
    dataset.global_shuffle(fleet, seed=seed)
    dataset.set_position({**position, "samples": 0})
    again = seen(dataset)
    dataset.load_into_memory()
    dataset.set_position({**within, "samples": 0})
    dataset.global_shuffle(fleet)  # as a loop does for each pass: the one before it is made again, too
    looped = seen(dataset)
    dataset.load_into_memory()
    dataset.global_shuffle(fleet)  # rank 0 draws
    return {"once": once, "twice": twice, "again": again, "looped": looped, "drawn": seen(dataset)}


def trained(dataset: Any, exe: Any, number: Any, batches: int) -> Any:
    """Make two passes of `batches` batches (0: with complements), print each, and return the weights."""
    if batches:
        dataset.set_batches_per_pass(batches)
    else:
        dataset.set_complement()
    for epoch in range(2):
        exe.train_from_dataset(
            fluid.default_main_program(), dataset, fetch_list=[number], fetch_info=[f"pass {epoch}"], print_period=1
        )
    scope = fluid.global_scope()
    return {n: np.array(scope.find_var(n)).tolist() for n in scope.names()}


def with_servers(folder: Path, seed: int) -> None:
    """Be a server, or a worker that shuffles with the others."""
    inputs, loss = recorded()
    fleet.init(PaddleCloudRoleMaker())
    fleet.distributed_optimizer(fluid.optimizer.SGD(1e-6), StrategyFactory.create_async_strategy()).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fluid.Executor(fluid.CPUPlace()).run(fleet.startup_program)
    fleet.init_worker()
    dataset = loaded(folder, fleet.worker_index(), inputs)
    found = {**shuffled(dataset, seed, fleet), "sizes": dataset.get_memory_data_size(fleet)}
    fleet.stop_worker()
    (folder / f"rank{fleet.worker_index()}.json").write_text(json.dumps(found))


def main(folder: Path, what: str, number: int) -> None:
    """Do what is asked."""
    if "PADDLE_PSERVERS_IP_PORT_LIST" in os.environ:
        with_servers(folder, number)
        return
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    exe, inputs = met(rank, os.environ["PADDLE_TRAINER_ENDPOINTS"].split(","))
    dataset = loaded(folder, rank, inputs)
    found = shuffled(dataset, number) if what == "shuffle" else trained(dataset, exe, inputs[0], number)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
