"""Strategies: the four factories' fields, and how configs are changed. Goldens: spec 1.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as fluid
from penstock.errors import SpecError
from penstock.exec.strategies import ReduceStrategy
from penstock.fleet.strategy import (
    DistributedStrategy,
    DistributedStrategyFactory,
    StrategyFactory,
    strategy_of,
)
from penstock.ps.settings import ServerRuntimeConfig, TrainerRuntimeConfig
from penstock.transpile.config import DistributeTranspilerConfig

MAKERS: dict[str, Callable[[], DistributedStrategy]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "half_async": StrategyFactory.create_half_async_strategy,
    "async": StrategyFactory.create_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(update_frequency=400),
}
PROGRAM_FIELDS = (
    "sync_mode", "runtime_split_send_recv", "half_async", "completely_not_async", "geo_sgd_mode",
    "geo_sgd_need_push_nums",
)  # fmt: skip


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")


@pytest.mark.parametrize(
    ("mode", "program", "use_thread_barrier"),
    [
        ("sync", (False, True, True, True, False, 100), True),
        ("half_async", (False, True, True, False, False, 100), True),
        ("async", (False, True, False, False, False, 100), False),
        ("geo", (False, True, False, False, True, 400), False),
    ],
)
def test_the_four_factories_have_fluids_fields(mode: str, program: tuple[Any, ...], use_thread_barrier: bool) -> None:
    strategy = MAKERS[mode]()
    assert tuple(getattr(strategy.get_program_config(), name) for name in PROGRAM_FIELDS) == program
    assert strategy.get_execute_strategy().use_thread_barrier is use_thread_barrier
    assert strategy.get_build_strategy().async_mode is True


@pytest.mark.parametrize(("cpu_num", "reduce"), [("1", ReduceStrategy.AllReduce), ("4", ReduceStrategy.Reduce)])
def test_threads_and_reduce_mode_come_from_cpu_num(
    cpu_num: str, reduce: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", cpu_num)
    for make in MAKERS.values():
        strategy = make()
        assert strategy.get_execute_strategy().num_threads == int(cpu_num)
        assert strategy.get_build_strategy().reduce_strategy == reduce


def test_both_names_of_the_factory_are_one_class() -> None:
    assert DistributedStrategyFactory is StrategyFactory


def test_making_a_strategy_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for make in MAKERS.values():
        make()
    assert caplog.messages == []


@pytest.mark.parametrize("frequency", [0, -1, 2.5, "400", True])
def test_geo_needs_a_whole_number_of_batches(frequency: Any) -> None:
    with pytest.raises(SpecError, match="expected the number of batches between two exchanges"):
        StrategyFactory.create_geo_strategy(update_frequency=frequency)


# -- changing configs --------------------------------------------------------------------------------


def _by_object() -> DistributeTranspilerConfig:
    config = DistributeTranspilerConfig()
    config.min_block_size = 81920
    return config


@pytest.mark.parametrize("given", [_by_object(), {"min_block_size": 81920}], ids=["object", "dict"])
def test_a_program_config_is_object_or_dict_and_keeps_the_mode(given: Any) -> None:
    strategy = StrategyFactory.create_sync_strategy()
    strategy.set_program_config(given)
    config = strategy.get_program_config()
    assert config.min_block_size == 81920
    assert (config.sync_mode, config.runtime_split_send_recv, config.completely_not_async) == (False, True, True)


def test_a_config_that_was_handed_out_may_be_changed() -> None:
    strategy = StrategyFactory.create_geo_strategy(7)
    strategy.get_program_config().min_block_size = 81920
    strategy.get_program_config().geo_sgd_mode = False
    made = strategy.for_transpiler()
    assert (made.min_block_size, made.geo_sgd_mode, made.geo_sgd_need_push_nums) == (81920, True, 7)


@pytest.mark.parametrize(
    ("setter", "key"),
    [
        ("set_program_config", "min_block_sise"),
        ("set_trainer_runtime_config", "communicator_send_queue_sise"),
        ("set_server_runtime_config", "_rpc_sned_thread_num"),
        ("set_execute_strategy", "num_thread"),
        ("set_build_strategy", "reduce_strategie"),
    ],
)
def test_an_unknown_key_is_refused_by_name_and_changes_nothing(setter: str, key: str) -> None:
    strategy = StrategyFactory.create_async_strategy()
    before = repr([getattr(strategy, setter.replace("set", "get", 1))()])
    with pytest.raises(SpecError, match=f"no (field|key) '{key}'"):
        getattr(strategy, setter)({key: 1})
    assert repr([getattr(strategy, setter.replace("set", "get", 1))()]) == before


@pytest.mark.parametrize(
    "setter",
    [
        "set_program_config", "set_trainer_runtime_config", "set_server_runtime_config", "set_execute_strategy",
        "set_build_strategy",
    ],
)  # fmt: skip
def test_something_else_than_a_config_or_a_dict_is_a_type_error(setter: str) -> None:
    with pytest.raises(TypeError, match=r"expected a \w+ or a dict"):
        getattr(StrategyFactory.create_sync_strategy(), setter)(["min_block_size"])


def test_runtime_configs_are_set_by_object_or_dict() -> None:
    strategy = StrategyFactory.create_async_strategy()
    strategy.set_trainer_runtime_config({"communicator_send_queue_size": 1})
    strategy.set_server_runtime_config({"_rpc_get_thread_num": 3})
    assert strategy.get_trainer_runtime_config().communicator_send_queue_size == 1
    assert strategy.get_server_runtime_config()["_rpc_get_thread_num"] == 3
    trainer, server = TrainerRuntimeConfig(), ServerRuntimeConfig()
    strategy.set_trainer_runtime_config(trainer)
    strategy.set_server_runtime_config(server)
    assert strategy.get_trainer_runtime_config() is trainer
    assert strategy.get_server_runtime_config() is server


def test_executors_strategies_keep_what_the_mode_decides(caplog: pytest.LogCaptureFixture) -> None:
    strategy = StrategyFactory.create_half_async_strategy()
    strategy.set_execute_strategy({"num_threads": 7, "use_thread_barrier": False})
    strategy.set_build_strategy(fluid.BuildStrategy())
    assert strategy.get_execute_strategy().num_threads == 7
    assert strategy.get_execute_strategy().use_thread_barrier is True
    assert strategy.get_build_strategy().async_mode is True
    assert "use_thread_barrier = False is not taken" in caplog.text


def test_fields_decided_by_a_mode_warn_when_changed_in_place(caplog: pytest.LogCaptureFixture) -> None:
    strategy = StrategyFactory.create_geo_strategy(5)
    assert strategy.for_transpiler().geo_sgd_need_push_nums == 5
    assert "not taken" not in caplog.text
    strategy.get_program_config().geo_sgd_need_push_nums = 9
    strategy.get_program_config().min_block_size = 81920
    assert strategy.for_transpiler().geo_sgd_need_push_nums == 5
    said = caplog.text
    assert "geo_sgd_need_push_nums = 9 is not taken: GeoStrategy keeps geo_sgd_need_push_nums = 5" in said
    assert "min_block_size" not in said


@pytest.mark.parametrize("of_another", ["half_async", "completely_not_async", "geo_sgd_mode"])
def test_a_mode_is_not_made_another_one_by_its_config(of_another: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = StrategyFactory.create_async_strategy()
    strategy.set_program_config({of_another: True})
    assert f"{of_another} = True is not taken: AsyncStrategy keeps {of_another} = False" in caplog.text
    setattr(strategy.get_program_config(), of_another, True)
    assert getattr(strategy.for_transpiler(), of_another) is False


def test_debug_options_are_known_ones() -> None:
    strategy = StrategyFactory.create_sync_strategy()
    strategy.set_debug_opt({"dump_fields": ["fc_0.w_0"]})
    assert strategy.get_debug_opt() == {"dump_fields": ["fc_0.w_0"], "dump_file_num": 16}
    with pytest.raises(SpecError, match="no debug option 'dump_field'"):
        strategy.set_debug_opt({"dump_field": []})
    with pytest.raises(TypeError, match="'dump_file_num' is '3'; expected int"):
        strategy.set_debug_opt({"dump_file_num": "3"})


# -- what distributed_optimizer takes ----------------------------------------------------------------


def _config(**fields: Any) -> DistributeTranspilerConfig:
    config = DistributeTranspilerConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        (None, "sync"),
        (_config(), "sync"),
        (_config(sync_mode=False), "half_async"),
        (_config(sync_mode=False, runtime_split_send_recv=True), "async"),
        (_config(sync_mode=False, runtime_split_send_recv=True, half_async=True), "half_async"),
        (_config(sync_mode=False, runtime_split_send_recv=True, geo_sgd_mode=True), "geo"),
        (_config(sync_mode=False, geo_sgd_mode=True), "geo"),
    ],
)
def test_a_config_says_its_mode(given: Any, mode: str) -> None:
    assert strategy_of(given).mode == mode


def test_a_config_keeps_its_other_fields_and_is_not_changed() -> None:
    given = _config(sync_mode=False, runtime_split_send_recv=True, geo_sgd_mode=True, geo_sgd_need_push_nums=9)
    given.min_block_size = 81920
    made = strategy_of(given).for_transpiler()
    assert (made.min_block_size, made.geo_sgd_need_push_nums) == (81920, 9)
    plain = _config()
    strategy_of(plain)
    assert plain.sync_mode is True


def test_another_kind_of_strategy_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected one of StrategyFactory's"):
        strategy_of("sync")
