"""fleet before any server runs: the order of its calls, its questions, and the programs that it makes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError, SpecError
from penstock.fleet.order import Calls, OrderError
from penstock.fleet.parameter_server import ParameterServerFleet
from penstock.fleet.roles import Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from penstock.fleet.strategy import StrategyFactory, StrategyTypeError
from penstock.ps.communicator import descriptor_of, remotes
from penstock.transpile import transpiler
from penstock.transpile.pserver import describe

SERVERS = ["127.0.0.1:6174", "127.0.0.1:6175"]


@pytest.fixture(autouse=True)
def fresh_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CPU_NUM", "1")
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        yield


def worker(index: int = 0, count: int = 2) -> ParameterServerFleet:
    made = ParameterServerFleet()
    made.init(UserDefinedRoleMaker(index, Role.WORKER, count, SERVERS))
    return made


def server(index: int = 0) -> ParameterServerFleet:
    made = ParameterServerFleet()
    made.init(UserDefinedRoleMaker(index, Role.SERVER, 2, SERVERS))
    return made


def asked(fleet: ParameterServerFleet, call: str) -> Any:
    """Read a property, or call a method."""
    found = getattr(fleet, call)
    return found() if callable(found) else found


def loss() -> Any:
    x = fluid.layers.data(name="x", shape=[4], dtype="float32")
    return fluid.layers.mean(fluid.layers.fc(x, size=3))


def model() -> Any:
    ids = fluid.data("ids", [-1, 1], "int64")
    rows = fluid.embedding(ids, [100, 4], is_sparse=True)
    return fluid.layers.mean(fluid.layers.fc(rows, 200)) + loss()


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise SpecError("there is no room")


def minimized(fleet: ParameterServerFleet, strategy: Any = None) -> ParameterServerFleet:
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy).minimize(loss())
    return fleet


# -- import paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("base.role_maker", ["PaddleCloudRoleMaker", "UserDefinedRoleMaker", "Role", "MPISymetricRoleMaker"]),
        ("parameter_server.distribute_transpiler", ["fleet"]),
        (
            "parameter_server.distribute_transpiler.distributed_strategy",
            ["StrategyFactory", "DistributedStrategy", "TrainerRuntimeConfig", "ServerRuntimeConfig"],
        ),
        ("parameter_server.distribute_transpiler.distributed_strategy_factory", ["DistributedStrategyFactory"]),
    ],
)
def test_fluids_import_paths_lead_to_fleet(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"penstock.incubate.fleet.{module}")
    for name in names:
        assert getattr(found, name).__class__.__module__ is not None
        assert name in found.__all__


def test_what_the_manuals_take_from_fluid_is_there() -> None:
    assert fluid.compiler.CompiledProgram is fluid.CompiledProgram
    assert fluid.DistributeTranspilerConfig().min_block_size == 8192


# -- questions ---------------------------------------------------------------------------------------


def test_a_worker_knows_its_place() -> None:
    fleet = worker(1)
    assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (True, False, False)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (1, 2, 2)
    assert fleet.server_endpoints() == SERVERS
    assert fleet.server_endpoints(to_string=True) == ",".join(SERVERS)
    assert fleet.worker_endpoints() == []
    assert fleet.split_files(["a", "b", "c"]) == ["c"]


def test_a_server_knows_its_place() -> None:
    fleet = server(1)
    assert (fleet.is_server(), fleet.server_index()) == (True, 1)
    with pytest.raises(SpecError, match=r"worker_index\(\) is asked of a server"):
        fleet.worker_index()


def test_init_without_a_role_maker_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1", "PADDLE_TRAINERS_NUM": "3", "TRAINING_ROLE": "TRAINER"}
    for name, value in {**environ, "PADDLE_TRAINER_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    fleet = ParameterServerFleet()
    fleet.init()
    assert (fleet.worker_index(), fleet.worker_num()) == (2, 3)


def test_one_worker_has_nobody_to_wait_for() -> None:
    fleet, total = worker(count=1), np.zeros(2)
    fleet.barrier_worker()
    fleet.all_reduce_worker(np.array([1.0, 2.0]), total)
    assert total.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("call", ["barrier_worker", "all_reduce_worker"])
def test_workers_rendezvous_at_the_servers_of_init_worker(call: str) -> None:
    with pytest.raises(OrderError, match=f"{call} comes before init_worker"):
        getattr(worker(), call)(*([1, np.zeros(1)] if call == "all_reduce_worker" else []))


def test_a_sum_is_of_numbers() -> None:
    with pytest.raises(StrategyTypeError, match="all_reduce_worker is given <U1; expected numbers"):
        worker(count=1).all_reduce_worker(["a"], np.zeros(1))
    total = np.zeros(1, np.int32)
    worker(count=1).all_reduce_worker([True], total)
    assert total.tolist() == [1]


# -- programs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_a_strategy_decides_how_a_workers_program_exchanges(mode: str) -> None:
    fleet = minimized(worker(1), getattr(StrategyFactory, f"create_{mode}_strategy")())
    found = descriptor_of(fleet.main_program)
    assert (found.mode, found.trainer, found.num_trainers, list(found.endpoints)) == (mode, 1, 2, SERVERS)
    assert descriptor_of(fleet.startup_program) == found


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_a_strategy_decides_how_a_servers_program_updates(mode: str) -> None:
    fleet = minimized(server(1), getattr(StrategyFactory, f"create_{mode}_strategy")())
    found = describe(fleet.main_program)
    assert found is not None
    assert (found.mode, found.endpoint, found.fanin) == (mode, SERVERS[1], 2)


def test_geo_exchanges_as_often_as_it_was_told() -> None:
    fleet = minimized(worker(), StrategyFactory.create_geo_strategy(update_frequency=400))
    assert descriptor_of(fleet.main_program).push_every == 400


def test_a_config_reaches_the_transpiler() -> None:
    strategy = StrategyFactory.create_sync_strategy()
    strategy.set_program_config({"slice_var_up": False, "min_block_size": 81920})
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.layers.data(name="x", shape=[200], dtype="float32")
        cost = fluid.layers.mean(fluid.layers.fc(x, size=200))
        fleet = server()
        fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy).minimize(cost)
    found = describe(fleet.main_program)
    assert found is not None
    assert [served.name for served in found.served] == [served.parameter for served in found.served]


def test_without_wait_port_a_worker_connects_at_its_first_run() -> None:
    config = fluid.DistributeTranspilerConfig()
    config.sync_mode = config.wait_port = False
    fleet = minimized(worker(), config)
    fleet.init_worker()  # nobody serves
    assert not remotes.opened()
    fleet.stop_worker()


# -- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["is_worker", "worker_num", "server_endpoints"])
def test_a_question_before_init_is_answered_with_what_to_do(call: str) -> None:
    with pytest.raises(SpecError, match=r"call fleet.init\(role\) first"):
        getattr(ParameterServerFleet(), call)()


def test_distributed_optimizer_comes_after_init() -> None:
    with pytest.raises(ValueError, match=r"distributed_optimizer comes before init. The order is: fleet.init\(role\)"):
        ParameterServerFleet().distributed_optimizer(fluid.optimizer.SGD(0.1))


@pytest.mark.parametrize("call", ["init_worker", "main_program", "startup_program"])
def test_what_needs_a_program_comes_after_minimize(call: str) -> None:
    fleet = worker()
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.1))
    with pytest.raises(SpecError, match=f"{call} comes before minimize"):
        asked(fleet, call)


def test_fleet_has_the_program_that_was_minimized_last() -> None:
    fleet = minimized(worker())
    first = fleet.main_program
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        minimized(fleet)
        assert fleet.main_program is fluid.default_main_program()
    assert fleet.main_program is not first


@pytest.mark.parametrize("begun", ["init_worker", "init_server"])
def test_no_other_program_is_minimized_once_one_has_begun(begun: str) -> None:
    calls = Calls()
    for call in ("init", "distributed_optimizer", "minimize", begun):
        calls.note(call)
    with pytest.raises(OrderError, match=rf"minimize comes after {begun}, .*; call fleet\.init\(role\)"):
        calls.check("minimize", None)
    calls.note("init")
    calls.note("distributed_optimizer")
    calls.check("minimize", None)


@pytest.mark.parametrize(
    ("fleet_of", "call", "words"),
    [
        (worker, "init_server", r"init_server\(\) is for servers, but .* this process is a worker"),
        (server, "init_worker", r"init_worker\(\) is for workers, but .* this process is a server"),
    ],
)
def test_a_call_of_the_other_role_is_refused(fleet_of: Any, call: str, words: str) -> None:
    fleet = minimized(fleet_of())
    with pytest.raises(SpecError, match=words):
        getattr(fleet, call)()


@pytest.mark.parametrize(
    ("fleet_of", "call", "before"), [(server, "run_server", "init_server"), (worker, "stop_worker", "init_worker")]
)
def test_an_end_comes_after_its_begin(fleet_of: Any, call: str, before: str) -> None:
    fleet = minimized(fleet_of())
    with pytest.raises(SpecError, match=f"{call} comes before {before}"):
        getattr(fleet, call)()


def test_a_failed_minimize_may_be_called_again() -> None:
    fleet = worker()
    optimizer = fleet.distributed_optimizer(fluid.optimizer.SGD(0.1))
    with pytest.raises(TypeError, match="expected one loss"):
        optimizer.minimize([loss()])  # type: ignore[arg-type]  # wrong on purpose
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        optimizer.minimize(loss())
        assert fleet.main_program is fluid.default_main_program()


@pytest.mark.parametrize("mode", ["sync", "geo"])
@pytest.mark.parametrize("step", ["place", "make_trainer_startup", "DistributeTranspiler.get_{}"])
@pytest.mark.parametrize(("fleet_of", "made"), [(worker, "trainer_program"), (server, "pserver_programs")])
def test_a_program_that_could_not_be_distributed_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, fleet_of: Any, made: str, step: str, mode: str
) -> None:
    """However far it came; and then it is distributed as if nobody had tried before."""
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")()

    def distributed(*, fails: bool) -> list[str]:
        with fluid.program_guard(fluid.Program(), fluid.Program()):
            cost = model()
            programs = [fluid.default_main_program(), fluid.default_startup_program()]
            before = [str(program) for program in programs]
            optimizer = fleet_of().distributed_optimizer(fluid.optimizer.Momentum(0.1, 0.9), strategy)
            if fails:
                with monkeypatch.context() as broken:
                    broken.setattr(f"{transpiler.__name__}.{step.format(made)}", refuse)
                    with pytest.raises(SpecError, match="no room"):
                        optimizer.minimize(cost)
                assert [str(program) for program in programs] == before
            optimizer.minimize(cost)
            return [str(program) for program in programs]

    assert distributed(fails=True) == distributed(fails=False)


def test_a_strategy_that_a_program_refuses_can_be_replaced() -> None:
    fleet = worker()
    ids = fluid.data("ids", [-1, 1], "int64")
    rows = fluid.embedding(ids, [100, 4], is_sparse=True, is_distributed=True)
    cost = fluid.layers.mean(fluid.layers.fc(rows, 1))
    programs = fluid.default_main_program(), fluid.default_startup_program()
    before = [str(program) for program in programs]
    with pytest.raises(ProgramError, match="Train it with another optimizer"):
        fleet.distributed_optimizer(fluid.optimizer.LarsMomentum(0.1, 0.9)).minimize(cost)
    assert [str(program) for program in programs] == before
    assert cost.name in programs[0].variables
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(cost)
    assert descriptor_of(fleet.main_program).mode == "sync"


# -- arguments ---------------------------------------------------------------------------------------


def test_arguments_of_another_kind_are_type_errors() -> None:
    with pytest.raises(TypeError, match="expected a role maker"):
        ParameterServerFleet().init("TRAINER")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="expected an optimizer"):
        worker().distributed_optimizer(0.1)
    with pytest.raises(TypeError, match="startup_program is"):
        worker().distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(loss(), [fluid.Program()])  # type: ignore[arg-type]  # wrong on purpose


def test_a_collective_role_has_no_servers_to_train_with() -> None:
    fleet = ParameterServerFleet()
    fleet.init(UserDefinedCollectiveRoleMaker(0, ["a:1", "b:1"]))
    assert (fleet.worker_index(), fleet.worker_num()) == (0, 2)
    with pytest.raises(SpecError, match=r"describes a collective job.* penstock.incubate.fleet.collective"):
        fleet.distributed_optimizer(fluid.optimizer.SGD(0.1))


def test_a_folder_without_a_save_fails_before_the_server_starts(tmp_path: Path) -> None:
    fleet = minimized(server())
    with pytest.raises(ValueError, match=r"holds no save: variables.json is not in it"):
        fleet.init_server(tmp_path)


def test_an_optimizer_of_its_own_distributes_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = worker()
    monkeypatch.setattr("penstock.fleet.parameter_server.fleet", mine)
    fluid_path = importlib.import_module("penstock.incubate.fleet.parameter_server.distribute_transpiler")
    made = fluid_path.TranspilerOptimizer(fluid.optimizer.SGD(0.1))
    assert made.strategy.mode == "sync"
    made.minimize(loss())
    assert descriptor_of(mine.main_program).mode == "sync"
    with pytest.raises(StrategyTypeError, match="strategy 'other'"):
        fluid_path.TranspilerOptimizer(fluid.optimizer.SGD(0.1), "other")
    with pytest.raises(StrategyTypeError, match="expected an optimizer"):
        fluid_path.TranspilerOptimizer("Adam", None)


def test_a_collective_optimizer_alone_has_the_default_strategy() -> None:
    collective = importlib.import_module("penstock.incubate.fleet.collective")
    made = collective.CollectiveOptimizer(fluid.optimizer.SGD(0.1), strategy=None)
    assert isinstance(made.strategy, collective.DistributedStrategy)
    assert made._owner is collective.fleet
