"""A constant of a Program may be fed: the value takes its place in that run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FeedError


@pytest.fixture
def program() -> Any:
    """2 x + factor, where the factor is a constant, 3; `drawn` is random, `counter` is written."""
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 2])
        factor = fluid.layers.fill_constant([1], "float32", 3.0)
        counter = fluid.layers.fill_constant([1], "float32", 1.0)
        drawn = fluid.layers.uniform_random([1])
        fluid.layers.increment(counter)
        main: Any = fluid.default_main_program()
        main.made = {
            "factor": factor,
            "out": 2.0 * x + factor,
            "counter": counter,
            "drawn": drawn,
            "rest": counter + drawn,
        }
        return main


def run(program: Any, feed: dict[str, Any], **given: Any) -> Any:
    out = program.made["out"]
    return fluid.Executor().run(program, {"x": np.ones((1, 2), "float32"), **feed}, [out], **given)[0].tolist()


@pytest.mark.parametrize("prunes", [False, True])
def test_a_fed_constant_replaces_the_value(program: Any, prunes: bool) -> None:
    exe, out, name = fluid.Executor(), program.made["out"], program.made["factor"].name
    x = np.ones((1, 2), "float32")

    def given(feed: dict[str, Any]) -> Any:
        return exe.run(program, {"x": x, **feed}, [out], use_prune=prunes)[0].tolist()

    before = str(program)
    assert given({}) == [[5.0, 5.0]]
    assert given({name: np.array([10.0], "float32")}) == [[12.0, 12.0]]
    assert given({name: np.array([20.0], "float32")}) == [[22.0, 22.0]]
    assert given({}) == [[5.0, 5.0]]
    assert str(program) == before


def test_a_fed_constant_has_its_sizes(program: Any) -> None:
    with pytest.raises(FeedError, match=r"float32\[2\]|shape \[2\]"):
        run(program, {program.made["factor"].name: np.zeros(2, "float32")})


@pytest.mark.parametrize("name", ["out", "counter", "drawn"])
def test_what_is_no_constant_cannot_be_fed(program: Any, name: str) -> None:
    with pytest.raises(FeedError, match="makes it, so it cannot be fed"):
        run(program, {program.made[name].name: np.zeros(1, "float32")})


def test_each_replica_of_a_compiled_program_has_the_fed_constant(program: Any) -> None:
    exe, out, name, scope = fluid.Executor(), program.made["out"], program.made["factor"].name, fluid.Scope()
    x = np.arange(6, dtype="float32").reshape(3, 2)
    for compiled, ways in (
        (fluid.CompiledProgram(program), 1),
        (fluid.CompiledProgram(program).with_data_parallel(places=[fluid.CPUPlace()] * 2), 2),
    ):

        def given(feed: Any, compiled: Any = compiled) -> Any:
            return exe.run(compiled, feed, [out], scope=scope)[0]

        for factor in (10.0, 20.0):
            fed = {name: np.array([factor], "float32")}
            np.testing.assert_array_equal(given({"x": x, **fed}), 2 * x + factor)
            np.testing.assert_array_equal(given({"x": x}), 2 * x + 3)
        own = [{"x": x, name: np.array([10.0 * i], "float32")} for i in range(ways)]
        np.testing.assert_array_equal(given(own), np.concatenate([2 * x + 10 * i for i in range(ways)]))
        with pytest.raises(FeedError, match=r"shape \[2\]"):
            given({"x": x, name: np.zeros(2, "float32")})
        with pytest.raises(FeedError, match="makes it, so it cannot be fed"):
            given({"x": x, program.made["drawn"].name: np.zeros(1, "float32")})


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_constant_is_fed_beside_the_batches_of_a_reader(replicas: int) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 2])
        factor = fluid.layers.fill_constant([1], "float32", 3.0)
        reader = fluid.io.DataLoader.from_generator([x], iterable=False)
        out, program = x * factor, fluid.default_main_program()
    reader.set_batch_generator(lambda: ([np.full((1, 2), n, "float32")] for n in range(1, 5)))
    compiled: Any = fluid.CompiledProgram(program)
    places = [fluid.CPUPlace()] * replicas
    runs = compiled.with_data_parallel(places=places) if replicas else program
    exe = fluid.Executor()
    reader.start()
    fed: Any = {factor.name: np.array([10.0], "float32")}
    feeds = ([fed] * replicas if replicas else fed, None)  # beside batches of their own replicas take a list
    found = [exe.run(runs, feed, [out])[0][:, 0].tolist() for feed in feeds]
    reader.reset()
    assert found == ([[10.0, 20.0], [9.0, 12.0]] if replicas else [[10.0], [6.0]])


@pytest.mark.parametrize("reduces", [False, True])
def test_updates_with_and_without_fed_constants_share_a_state(reduces: bool) -> None:
    strategy = fluid.BuildStrategy()
    if reduces:
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce

    def trained(compiles: bool) -> Any:
        main, startup, scope = fluid.Program(seed=1), fluid.Program(seed=1), fluid.Scope()
        with fluid.program_guard(main, startup), fluid.unique_name.guard():
            factor = fluid.layers.fill_constant([1], "float32", 1.0)
            loss = fluid.layers.mean(fluid.layers.fc(fluid.data("x", [None, 2]), 1, param_attr="w") * factor)
            fluid.optimizer.Momentum(0.1, 0.5).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup, scope=scope)
        places = [fluid.CPUPlace()] * 2
        compiled = fluid.CompiledProgram(main).with_data_parallel(loss.name, strategy, places=places)
        program: Any = compiled if compiles else main
        fed = {factor.name: np.array([4.0], "float32")}
        for feed in (fed, {}, {}, fed, {}):
            exe.run(program, {"x": np.ones((2, 2), "float32"), **feed}, [loss], scope=scope)
        return np.array(scope.find_var("w").get_tensor()).tolist()

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("seed", [0, 3])
def test_runs_with_and_without_a_fed_constant_draw_by_one_count(seed: int, compiles: bool) -> None:
    with fluid.program_guard(fluid.Program(seed=seed), fluid.Program()):
        factor = fluid.layers.fill_constant([1], "float32", 1.0)
        out = fluid.layers.dropout(fluid.data("x", [None, 64]), 0.5) * factor
        main = fluid.default_main_program()
    program: Any = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()]) if compiles else main
    exe, x, scope = fluid.Executor(), np.ones((1, 64), "float32"), fluid.Scope()

    def mask(feed: dict[str, Any], scope: fluid.Scope) -> bytes:
        found: bytes = exe.run(program, {"x": x, **feed}, [out], scope=scope)[0].tobytes()
        return found

    fed = {factor.name: np.ones(1, "float32")}
    mixed = [mask(feed, scope) for feed in ({}, fed, {}, fed, fed)]
    assert len(set(mixed)) == len(mixed) == scope.steps(main)
    scope.set_steps(main, 0)
    assert [mask({}, scope) for _ in mixed] == mixed
