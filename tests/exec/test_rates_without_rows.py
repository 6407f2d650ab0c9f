"""Batches with fewer rows than replicas, and a learning rate that is fed: replicas without rows update by it, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid

REPLICAS = 4
ROUNDING = 1e-12  # of sums of 8 numbers near 1 in float64, in another order


def train(num_rows: int, *, replicas: int, is_computed: bool = False, reduces: bool = False) -> Any:
    """Return a weight, whose own factor multiplies the rate, after batches of 8 and of `num_rows` rows by turns."""
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    main.random_seed = startup.random_seed = 3
    with fluid.program_guard(main, startup):
        x, y = fluid.data("x", [None, 3], "float64"), fluid.data("y", [None, 1], "float64")
        rate = fluid.data("rate", [1], "float64")
        attribute = fluid.ParamAttr("weight", learning_rate=2.0)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1, param_attr=attribute), y))
        fluid.optimizer.Momentum(rate * 0.5 if is_computed else rate, 0.9).minimize(loss)
    exe.run(startup, scope=scope)
    program: Any = main
    if replicas > 1:
        strategy = fluid.BuildStrategy()
        if reduces:
            strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        program = fluid.CompiledProgram(main).with_data_parallel(
            loss.name, strategy, places=[fluid.CPUPlace()] * replicas
        )
    random = np.random.default_rng(0)
    for step in range(4):
        rows = num_rows if step % 2 else 8
        feed = {
            "x": random.normal(size=(rows, 3)),
            "y": random.normal(size=(rows, 1)),
            "rate": np.array([0.1 / (step + 1)]),
        }
        exe.run(program, feed=feed, fetch_list=[loss], scope=scope)
    return np.array(scope.find_var("weight").get_tensor())


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_fed_rate_reaches_replicas_without_rows(num_rows: int, is_computed: bool, reduces: bool) -> None:
    expected = train(num_rows, replicas=1, is_computed=is_computed)
    got = train(num_rows, replicas=REPLICAS, is_computed=is_computed, reduces=reduces)
    np.testing.assert_allclose(got, expected, rtol=ROUNDING, atol=ROUNDING)
