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


@pytest.mark.parametrize("compiles", [False])
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
