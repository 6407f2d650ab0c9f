"""Rows of docs/fluid-parity.md on jobs with parameter servers: settings that take effect, size, saves, CTR-DNN."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.server_jobs import Feed, Model, locally, together
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Trainer
from tests.support.nursery import Nursery, all_end_well
from tests.support.pserver_jobs import begin_job

import flights_data
import flights_model
import penstock as fluid
from penstock.fleet.parameter_server import ParameterServerFleet
from penstock.fleet.roles import Role, UserDefinedRoleMaker
from penstock.fleet.strategy import StrategyFactory
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerRuntimeConfig, ServerSettings
from penstock.ps.table import FirstValues, SparseTable, TableSettings
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.pserver import describe
from train import area_under_curve

SCRIPT = Path(__file__).parent / "scripts" / "table_of_any_id.py"
ENVIRON = {"CPU_NUM": "1", "PENSTOCK_PS_START_S": "60"}


def test_row_64_a_row_of_8_floats_with_adagrad_takes_80_bytes() -> None:
    rows, width = 10**6, 8
    table = SparseTable(TableSettings("t", width, rows, FirstValues("uniform", -1.0, 1.0), {"moment": 0.0}))
    for ids in np.array_split(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows), 20):
        table.push_adagrad(ids, np.ones((len(ids), width), np.float32), lr=0.1)
    assert len(table) == rows, "no two of the random ids are equal"
    # Pieces that are not full cost a small table more than a large one: up to two pieces of 32 KiB for each shard.
    unfilled = 8 * 2 * 32768 / rows
    assert 2 * 4 * width + table.overhead_bytes / rows <= 80 + unfilled


def test_row_94_geo_exchanges_every_100_batches_by_default() -> None:
    assert StrategyFactory.create_geo_strategy().for_transpiler().geo_sgd_need_push_nums == 100
    assert StrategyFactory.create_geo_strategy(update_frequency=7).for_transpiler().geo_sgd_need_push_nums == 7


def _config_object() -> DistributeTranspilerConfig:
    config = DistributeTranspilerConfig()
    config.min_block_size = 81920
    return config


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["w.block0"]), ({"min_block_size": 81920}, ["w"]), (_config_object(), ["w"])],
    ids=["as_it_is", "dict", "object"],
)
def test_row_100_a_program_config_decides_how_parameters_are_cut(given: Any, expected: list[str]) -> None:
    strategy, server = StrategyFactory.create_sync_strategy(), ParameterServerFleet()
    if given is not None:
        strategy.set_program_config(given)
    server.init(UserDefinedRoleMaker(0, Role.SERVER, 2, ["127.0.0.1:6174", "127.0.0.1:6175"]))
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.layers.data("x", [200])
        loss = fluid.layers.mean(fluid.layers.fc(x, 200, param_attr="w", bias_attr=False))
        server.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy).minimize(loss)
    found = describe(server.main_program)
    assert found is not None
    assert [served.name for served in found.served] == expected  # 40,000 elements are two blocks of 8192 or more


@pytest.mark.parametrize("threads", [1, 3])
def test_row_101_a_server_updates_as_many_blocks_at_once_as_set(threads: int) -> None:
    at_once = ServerRuntimeConfig.from_dict({"_rpc_send_thread_num": threads}).num_updates_at_once()
    assert at_once == threads
    names, size = [f"w{i}" for i in range(4)], 10**6  # small gradients are not worth other threads
    storage = TorchStorage(dict.fromkeys(names, (size,)))
    inside, most, changed = 0, 0, threading.Condition()

    def hold(_block: str) -> None:
        """Stay until as many are inside as may be; one more than that would be seen."""
        nonlocal inside, most
        with changed:
            inside, most = inside + 1, max(most, inside + 1)
            changed.notify_all()
            changed.wait_for(lambda: most >= threads, 20)
            inside -= 1

    storage.before = hold
    settings = ServerSettings("127.0.0.1:0", 0, 1, "sync", job="j", token="t", num_threads=at_once)
    with ParameterServer(settings, storage) as server:
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        for name in names:
            trainer.push(name, 0, torch.ones(size))
        trainer.barrier(0)
        trainer.pull(*names, round=1)
        Trainer.close_all()
    assert most == threads


def losses_of_job(nursery: Nursery, folder: Path, *options: str, servers: int) -> list[float]:
    """Run the fleet script as a job with one trainer, in a folder that it may save in; return its losses."""
    job = begin_job(nursery, folder, SCRIPT, *options, servers=servers, trainers=1, environ=ENVIRON)
    try:
        all_end_well(job)
    finally:
        for process in job:
            process.close()
    losses: list[float] = json.loads(job[-1].output.splitlines()[-1])
    return losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_row_102_a_job_with_hashed_ids_resumes_on_other_servers(nursery: Nursery, tmp_path: Path) -> None:
    first = losses_of_job(nursery, tmp_path, "--steps", "8", "--save_after", "4", servers=2)
    options = ("--load", "save", "--first_step", "4", "--steps", "4")
    again = losses_of_job(nursery, tmp_path, *options, servers=1)
    assert len(first) == 8
    # float32; ids of one server are summed in another order than those of two
    assert again == pytest.approx(first[4:], rel=1e-5)
    assert first[4] != pytest.approx(first[0], rel=0.01), "what was restored is not what training begins with"


def ctr_dnn(vocabulary_sizes: Any) -> tuple[Model, str]:
    """CTR-DNN of the flights; also the name of what it predicts."""
    made = flights_model.build(vocabulary_sizes, seed=1, optimizer=fluid.optimizer.Adam(2e-3))
    return Model(made.main, made.startup, made.loss), made.predict


def flights_feeds(flights: flights_data.Flights, num: int, rows: int) -> Iterator[Feed]:
    """Batches of the training rows."""
    for batch in islice(flights_data.batches(flights.train, rows, seed=1, pass_index=0), num):
        yield flights_model.feed(batch)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_row_103_ctr_dnn_with_servers_scores_as_on_one_machine() -> None:
    flights = flights_data.load()
    predict = ctr_dnn(flights.vocabulary_sizes)[1]

    def auc(exe: fluid.Executor, model: Model, scope: fluid.Scope) -> float:
        """Score 10,000 flights that were held back."""
        test = model.main.clone(for_test=True)
        scores = []
        for batch in islice(flights_data.in_order(flights.test, 2500), 4):
            (found,) = exe.run(test, flights_model.feed(batch), [predict], scope=scope)
            scores.append(np.asarray(found)[:, 1])
        late = np.concatenate(scores)
        return area_under_curve(flights.test.label[: len(late)], late)

    def make() -> Model:
        return ctr_dnn(flights.vocabulary_sizes)[0]

    feeds = list(flights_feeds(flights, 20, 1000))
    halves = [[{name: value[i::2] for name, value in feed.items()} for feed in feeds] for i in range(2)]
    alone = locally(make, feeds, auc).more
    served = together(make, halves, servers=2, after=auc)[0].more
    assert alone > 0.65  # 0.5 is what chance gives
    assert served == pytest.approx(alone, abs=0.002)
