"""Gradients of intermediate results, fetched by Fluid's names, and variables that a run makes anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FetchError
from penstock.scope import Scope

L: Any = fluid.layers
X = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("how", ["Executor", "one replica", "two replicas", "clone", "recomputed"])
def test_gradients_of_intermediates_are_fetched_by_name(how: str) -> None:
    with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
        x = L.data("x", [3], dtype="float64")
        hidden = L.fc(x, 4, act="tanh", param_attr="w", bias_attr=False)
        doubled = hidden * 2.0
        loss = L.mean(doubled * hidden)  # two uses of one result: their gradients are added
        optimizer: Any = fluid.optimizer.SGD(0.1)
        if how == "recomputed":
            optimizer = fluid.optimizer.RecomputeOptimizer(optimizer)
            optimizer._set_checkpoints([doubled])
        optimizer.minimize(loss)
    program: Any = main.clone() if how == "clone" else main
    if "replica" in how:
        places = [fluid.CPUPlace()] * (2 if how == "two replicas" else 1)
        program = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=places)
    exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    names = [hidden.name, f"{hidden.name}@GRAD", f"{doubled.name}@GRAD"]
    h, of_h, of_doubled = exe.run(program, {"x": X}, names, scope=scope)
    np.testing.assert_allclose(of_h, 4 * h / 8, rtol=1e-12)
    np.testing.assert_allclose(of_doubled, h / 8, rtol=1e-12)


def test_of_two_losses_the_gradient_is_that_of_the_first() -> None:
    with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
        hidden = L.fc(L.data("x", [3], dtype="float64"), 4, param_attr="w", bias_attr=False)
        fluid.append_backward(L.mean(hidden))
        fluid.append_backward(L.mean(hidden * hidden))
    exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    of_h, of_w = exe.run(main, {"x": X}, [f"{hidden.name}@GRAD", "w@GRAD"], scope=scope)
    np.testing.assert_allclose(of_h, np.full((2, 4), 1 / 8), rtol=1e-12)
    np.testing.assert_allclose(of_w, X.T @ of_h, rtol=1e-12)


def test_a_result_that_no_loss_depends_on_has_no_gradient() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x = L.data("x", [3], dtype="float64")
        aside = L.tanh(x)
        fluid.append_backward(L.mean(L.fc(x, 1)))
    with pytest.raises(FetchError, match=f"{aside.name}@GRAD"):
        fluid.Executor().run(main, {"x": X}, [f"{aside.name}@GRAD"])


def test_a_global_variable_that_is_not_persistable_begins_anew() -> None:
    with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
        counter = L.create_global_var([1], 2.0, "float32", name="counter")
        L.increment(counter, 1.5)
    assert counter.name == "counter" and not counter.persistable
    exe = fluid.Executor()
    exe.run(startup)
    for _ in range(2):
        assert exe.run(main, fetch_list=["counter"])[0].tolist() == [3.5]
