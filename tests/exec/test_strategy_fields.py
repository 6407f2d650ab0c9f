"""Fields of the strategies: what is refused, what is said, and when a strategy can no longer change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.property.networks import Network, fit_a_line
from tests.property.oracle import started

import penstock as fluid
from penstock.errors import ArgumentError, FeedError, SpecError
from penstock.scope import Scope

CUSTOMIZED = fluid.BuildStrategy.GradientScaleStrategy.Customized


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")


def build(**fields: Any) -> fluid.BuildStrategy:
    """A BuildStrategy with fields."""
    strategy = fluid.BuildStrategy()
    for name, field in fields.items():
        setattr(strategy, name, field)
    return strategy


def by_parallel_executor(network: Network, strategy: fluid.BuildStrategy, **options: Any) -> None:
    fluid.ParallelExecutor(False, network.loss, network.main, build_strategy=strategy, scope=Scope(), **options).close()


def by_compiled_program(network: Network, strategy: fluid.BuildStrategy) -> None:
    compiled = fluid.CompiledProgram(network.main).with_data_parallel(network.loss, strategy)
    fluid.Executor().run(compiled, network.feed(4, 0), scope=started(network.startup))


DOORS = [by_parallel_executor, by_compiled_program]
Door = Callable[[Network, fluid.BuildStrategy], None]


@pytest.mark.parametrize("door", DOORS)
def test_a_strategy_in_use_by_an_executor_is_immutable(door: Door) -> None:
    strategy = build(enable_sequential_execution=True)
    door(fit_a_line(), strategy)
    with pytest.raises(SpecError, match=r"memory_optimize = True comes too late: an executor \(of 2 replicas"):
        strategy.memory_optimize = True
    copied = copy.copy(strategy)
    copied.enable_inplace = False
    assert (copied.enable_sequential_execution, copy.deepcopy(strategy).enable_sequential_execution) == (True, True)
    assert strategy.enable_inplace is True
    door(fit_a_line(), strategy)  # another executor may use it as it is


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_trainers": 2}, "num_trainers is 2, but the trainers' endpoints are not set: run the startup program"),
        ({"trainer_id": 1}, "trainer_id is 1, but num_trainers is 1; expected a number from 0 to 0"),
        (
            {"trainer_id": 2, "trainers_endpoints": ["a:1", "b:1"], "num_trainers": 2},
            "trainer_id is 2, but trainers_endpoints has 2; expected a number from 0 to 1",
        ),
        ({"num_trainers": 3, "trainers_endpoints": ["a:1"]}, "num_trainers is 3, but trainers_endpoints has 1"),
        ({"use_hierarchical_allreduce": True}, "num_trainers is 1, hierarchical_allreduce_inter_nranks is 0"),
        (
            {"num_trainers": 4, "use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 3},
            "needs several trainers in equal groups .* num_trainers is 4, hierarchical_allreduce_inter_nranks is 3",
        ),
        (
            {"num_trainers": 4, "use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
            "num_trainers is 4, but the trainers' endpoints are not set",
        ),
    ],
)
def test_fields_of_several_trainers_agree_or_are_refused(fields: dict[str, Any], words: str, door: Door) -> None:
    with pytest.raises(SpecError, match=words):
        door(fit_a_line(), build(**fields))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_trainers": 2}, "num_trainers is 2, but the trainers' endpoints are not set"),
        ({"trainer_id": 1}, "trainer_id is 1, but num_trainers is 1"),
        ({"trainer_id": -1}, "trainer_id is -1, but num_trainers is 1"),
        ({"num_trainers": 0}, "but num_trainers is 0; expected"),
    ],
)
def test_trainer_arguments_are_checked_like_strategy_fields(options: dict[str, int], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        by_parallel_executor(fit_a_line(), build(), **options)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("trainer_id", -1, "trainer_id is -1, but num_trainers is 1; expected a number from 0 to 0"),
        ("num_trainers", 0, "num_trainers is 0; expected int from 1 on"),
        ("nccl_comm_num", 0, "nccl_comm_num is 0; expected int from 1 on"),
        ("trainers_endpoints", "a:1", "trainers_endpoints is 'a:1'; expected a list of str"),
        ("trainers_endpoints", [1], r"trainers_endpoints is \[1\]; expected a list of str"),
    ],
)
def test_impossible_values_are_refused_on_assignment(field: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build(**{field: value})


def test_replicas_that_do_not_wait_need_parameter_servers() -> None:
    with pytest.raises(SpecError, match="async_mode is True, but the program talks to no parameter servers"):
        by_parallel_executor(fit_a_line(), build(async_mode=True))


def test_a_list_is_the_strategys_own() -> None:
    endpoints = ["a:1"]
    strategy = build(trainers_endpoints=endpoints)
    endpoints.append("b:1")
    assert strategy.trainers_endpoints == ["a:1"]
    assert fluid.BuildStrategy().trainers_endpoints == []
    assert repr(strategy) == "BuildStrategy(trainers_endpoints=['a:1'])"


@pytest.mark.parametrize("kind", [fluid.BuildStrategy, fluid.ExecutionStrategy])
def test_a_field_without_effect_warns_once_unless_at_default(kind: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    assert kind._without_effect.keys() <= kind._defaults.keys()
    others: dict[type, Callable[[Any], Any]] = {
        bool: lambda value: not value,
        int: lambda value: value + 7,
        type(None): lambda _: True,
        list: lambda _: ["conv2d"],
    }
    for name, why in kind._without_effect.items():
        default = kind._defaults[name]
        for _ in range(2):
            strategy = kind()
            setattr(strategy, name, default)
            setattr(strategy, name, others[type(default)](default))
        (warning,) = caplog.messages
        caplog.clear()
        assert warning.startswith(f"{kind.__name__}.{name} = ")
        assert warning.endswith(f"is stored but has no effect: {why}")


def test_several_iterations_a_run_need_a_reader_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    network = fit_a_line()
    execution = fluid.ExecutionStrategy()
    execution.num_iteration_per_run = 5
    for _ in range(2):
        executor = fluid.ParallelExecutor(
            False, network.loss, network.main, exec_strategy=execution, scope=started(network.startup)
        )
        assert executor.run([network.loss], network.feed(4, 0))[0].shape == (2,)
        executor.close()
    assert caplog.messages == [
        "ExecutionStrategy.num_iteration_per_run = 5 has no effect: it needs a reader in the program "
        "(fluid.io.DataLoader, iterable=False); each run is one iteration on what is fed"
    ]


@pytest.fixture
def customized() -> Iterator[tuple[Network, fluid.ParallelExecutor]]:
    """Two replicas that are fed the gradient of the loss."""
    network = fit_a_line()
    strategy = build(gradient_scale_strategy=CUSTOMIZED)
    executor = fluid.ParallelExecutor(
        False, network.loss, network.main, build_strategy=strategy, scope=started(network.startup)
    )
    yield network, executor
    executor.close()


Customized = tuple[Network, fluid.ParallelExecutor]


def test_a_missing_loss_gradient_is_requested_with_its_shape(customized: Customized) -> None:
    network, executor = customized
    with pytest.raises(FeedError) as caught:
        executor.run([], network.feed(4, 0))
    text = str(caught.value)
    assert text.startswith("'mean_0.tmp_0@GRAD' (the gradient of the loss, recorded at networks.py:")
    assert "feed it as float32[2], one entry for each replica, e.g. numpy.full(2, 1 / 2, 'float32')" in text
    with pytest.raises(FeedError, match=r"is not fed.*feed it as float32\[1\], the replica's one entry"):
        executor.run([], [network.feed(2, 0), network.feed(2, 1)])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 2), (2, 2)])
def test_a_gradient_of_the_loss_of_another_shape_names_both(shape: tuple[int, ...], customized: Customized) -> None:
    network, executor = customized
    fed = {f"{network.loss}@GRAD": np.ones(shape, "float32")}
    with pytest.raises(FeedError) as caught:
        executor.run([], network.feed(4, 0) | fed)
    assert f"feed 'mean_0.tmp_0@GRAD' has shape {list(shape)}, but the gradient of the loss" in str(caught.value)
    assert "is fed as float32[2]: one entry for each replica (CPU_NUM)" in str(caught.value)


def test_a_gradient_of_the_loss_of_another_dtype_is_refused(customized: Customized) -> None:
    network, executor = customized
    with pytest.raises(FeedError, match=r"@GRAD' is float64\[2\], but the program expects float32"):
        executor.run([], network.feed(4, 0) | {f"{network.loss}@GRAD": np.ones(2)})


def test_each_replica_starts_from_its_entry_in_dict_or_list(customized: Customized) -> None:
    network, executor = customized
    name, feed = f"{network.loss}@GRAD", network.feed(4, 0)
    halves = [{n: a[:2] for n, a in feed.items()}, {n: a[2:] for n, a in feed.items()}]
    (split,) = executor.core.run(feed | {name: [3.0, 5.0]}, [name])
    column = np.array([[3.0], [5.0]], "float32")
    (again,) = executor.core.run(feed | {name: column}, [name])
    each = [half | {name: np.full(1, v, "float32")} for half, v in zip(halves, (3.0, 5.0), strict=True)]
    (listed,) = executor.core.run(each, [name])
    assert [float(part) for parts in (split, again, listed) for part in parts] == [3.0, 5.0] * 3


def test_a_small_batch_takes_the_first_entries(customized: Customized) -> None:
    network, executor = customized
    name = f"{network.loss}@GRAD"
    (parts,) = executor.core.run(network.feed(1, 0) | {name: [3.0, 5.0]}, [name])
    assert [float(part) for part in parts] == [3.0]


def test_without_customized_the_gradient_of_the_loss_is_no_feed() -> None:
    network = fit_a_line()
    feed = network.feed(4, 0) | {f"{network.loss}@GRAD": np.ones(2, "float32")}
    words = "the gradient of the loss is computed, unless BuildStrategy.gradient_scale_strategy is Customized"
    with pytest.raises(FeedError, match=words):
        fluid.Executor().run(network.main, feed, scope=started(network.startup))
    executor = fluid.ParallelExecutor(False, network.loss, network.main, scope=started(network.startup))
    with pytest.raises(FeedError, match=words):
        executor.run([], feed)
    executor.close()


def test_a_compiled_program_is_for_the_scope_of_its_first_run() -> None:
    network = fit_a_line()
    compiled = fluid.CompiledProgram(network.main).with_data_parallel(network.loss)
    first, second = started(network.startup), started(network.startup)
    fluid.Executor().run(compiled, network.feed(4, 0), scope=first)
    with pytest.raises(SpecError, match="compiled for another scope at its first run"):
        fluid.Executor().run(compiled, network.feed(4, 0), scope=second)
    fluid.Executor().run(compiled, network.feed(4, 1), scope=first)


def test_a_compiled_program_shares_only_with_a_parallel_one() -> None:
    network = fit_a_line()
    clone = network.main.clone(for_test=True)
    train = fluid.CompiledProgram(network.main).with_data_parallel(network.loss)
    scope = started(network.startup)

    def sharing(other: Any, places: int = 2) -> fluid.CompiledProgram:
        return fluid.CompiledProgram(clone).with_data_parallel(
            share_vars_from=other, places=[fluid.CPUPlace()] * places
        )

    with pytest.raises(SpecError, match="share_vars_from is a str; expected a CompiledProgram"):
        fluid.Executor().run(sharing("train"), network.feed(4, 0), scope=scope)
    with pytest.raises(SpecError, match="is not data parallel; call its with_data_parallel first"):
        fluid.Executor().run(sharing(fluid.CompiledProgram(clone)), network.feed(4, 0), scope=scope)
    with pytest.raises(SpecError, match="has not run yet, so it has no parameters to share"):
        fluid.Executor().run(sharing(train), network.feed(4, 0), scope=scope)
    fluid.Executor().run(train, network.feed(4, 0), scope=scope)
    with pytest.raises(SpecError, match="share_vars_from has 2 replicas"):
        fluid.Executor().run(sharing(train, 3), network.feed(4, 0), scope=scope)
    got = fluid.Executor().run(sharing(train), network.feed(4, 9), [network.loss], scope=Scope())
    alone = fluid.Executor().run(clone, network.feed(4, 9), [network.loss], scope=scope)
    np.testing.assert_allclose(got[0].mean(), alone[0][0], rtol=1e-5)


def test_data_parallel_after_a_run_comes_too_late() -> None:
    network = fit_a_line()
    compiled = fluid.CompiledProgram(network.main)
    fluid.Executor().run(compiled, network.feed(4, 0), scope=started(network.startup))
    with pytest.raises(SpecError, match="has run already"):
        compiled.with_data_parallel(network.loss)
    with pytest.raises(ArgumentError, match=r"is given a str; expected a fluid\.Program"):
        fluid.CompiledProgram("main")
