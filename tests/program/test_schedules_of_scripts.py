"""Schedules and decays that scripts record by hand, with Fluid's guards of roles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.training.schedules import decay_step_counter

L = fluid.layers
WARMUP, STEPS, RATE, DECAY = 3, 10, 0.1, 0.01


def rate_at(step: int) -> float:
    return RATE * step / WARMUP if step < WARMUP else RATE * (1 - step / STEPS)


def warmed(program: Any) -> Any:
    with program._lr_schedule_guard():
        rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
        step = decay_step_counter()
        with L.Switch() as switch:
            with switch.case(step < WARMUP):
                L.assign(RATE * (step / WARMUP), rate)
            with switch.default():
                L.assign(L.polynomial_decay(RATE, STEPS, 0.0, 1.0), rate)
    return rate


def test_schedules_of_branches_and_by_hand_follow_their_formulas() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 4], "float32")
        loss = L.mean(L.fc(x, 1, param_attr="w", bias_attr=False))
        rate = warmed(main)
        before = main.all_parameters()[0] * 1.0
        before.stop_gradient = True
        _, (pair,) = fluid.optimizer.SGD(rate).minimize(loss)
        with main._optimized_guard(list(pair)):
            L.assign(pair[0] - before * DECAY * rate, pair[0])
    assert {op.role for op in main.operators[-3:]} == {Role.OPTIMIZE}
    assert {op.role_vars for op in main.operators[-3:]} == {(("w", "w@GRAD"),)}
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    w = np.array(scope.find_var("w"))
    rows = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    for step in range(STEPS - 1):
        (found,) = exe.run(main, {"x": rows}, ["rate"], scope=scope)
        np.testing.assert_allclose(found, [rate_at(step)], rtol=1e-6)
        w = w - rate_at(step) * (rows.mean(0)[:, None] + DECAY * w)
        np.testing.assert_allclose(np.array(scope.find_var("w")), w, rtol=1e-5, atol=1e-6)


def test_a_rate_that_is_computed_of_schedules_follows_them() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        loss = L.mean(L.fc(fluid.data("x", [None, 4], "float32"), 1, param_attr="w", bias_attr=False))
        with main._lr_schedule_guard():
            rate = L.exponential_decay(0.5, 1, 0.5) * 0.1 + L.piecewise_decay([2], [1.0, 2.0])
        fluid.optimizer.SGD(rate).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    w, rows = np.array(scope.find_var("w")), np.ones((2, 4), "float32")
    for step in range(4):
        wanted = 0.05 * 0.5**step + (1.0 if step < 2 else 2.0)
        (found,) = exe.run(main, {"x": rows}, [rate], scope=scope)
        np.testing.assert_allclose(found, [wanted], rtol=1e-6)
        w = w - wanted
        np.testing.assert_allclose(np.array(scope.find_var("w")), w, rtol=1e-6)
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        loss = L.mean(L.fc(fluid.data("x", [None, 4], "float32"), 1))
        with pytest.raises(ProgramError, match="must be one persistable number"):
            fluid.optimizer.SGD(loss * 0.1).minimize(loss)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", [fluid.optimizer.SGD, fluid.optimizer.Adam])
def test_a_rate_of_16_bits_is_refused_when_it_is_recorded(optimizer: Any, dtype: str) -> None:
    rates: dict[str, Any] = {
        "computed": lambda: L.cast(L.noam_decay(4, 10), dtype),
        "persistable": lambda: L.create_global_var([1], 0.1, dtype, persistable=True, name="rate"),
    }
    for make in rates.values():
        main, scope = fluid.Program(), fluid.Scope()
        with fluid.program_guard(main, fluid.Program()), fluid.scope_guard(scope):
            loss = L.mean(L.fc(fluid.data("x", [None, 4], "float32"), 1))
            rate = make()
            with pytest.raises(ProgramError, match=rf"{dtype}.* has 16 bits.*fluid.layers.cast\(rate, 'float32'\)"):
                optimizer(rate).minimize(loss)
            optimizer(L.cast(L.noam_decay(4, 10), "float32")).minimize(loss)


FED = [0.5, 0.25, 0.0, 0.125]


def fed_by_numbers(optimizer: Any, form: Any, number: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight before and after steps whose rates are fed; `form`: how two replicas exchange, None: there is
    one."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        fed = fluid.data("rate", [1], "float64")
        loss = L.mean(L.fc(fluid.data("x", [None, 4], "float64"), 1, param_attr="w", bias_attr=False))
        optimizer(fed * 0.5).minimize(loss)
    exe, program = fluid.Executor(fluid.CPUPlace()), main
    exe.run(startup, scope=scope)
    first = np.array(scope.find_var("w"))
    if form is not None:
        build = fluid.BuildStrategy()
        build.reduce_strategy = form
        program = fluid.CompiledProgram(main).with_data_parallel(loss.name, build, places=[fluid.CPUPlace()] * 2)
    for rate in FED:
        exe.run(program, {"x": np.ones((4, 4)), "rate": number(2 * rate)}, [loss], scope=scope)
    return first, np.array(scope.find_var("w"))


def adam_by_formula(w: np.ndarray) -> np.ndarray:
    """Fluid 1.8's adam_op of gradients of 1."""
    first = second = 0.0
    for step, rate in enumerate(FED, start=1):
        first, second = 0.9 * first + 0.1, 0.999 * second + 0.001
        corrected = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        w = w - corrected * first / (np.sqrt(second) + 1e-8)
    return w


REDUCE = fluid.BuildStrategy.ReduceStrategy


@pytest.mark.parametrize("number", [float, lambda rate: np.array([rate])], ids=["float", "array"])
@pytest.mark.parametrize("form", [None, REDUCE.AllReduce, REDUCE.Reduce])
def test_rates_that_are_fed_are_those_of_the_updates(form: Any, number: Any) -> None:
    before, after = fed_by_numbers(fluid.optimizer.SGD, form, number)
    np.testing.assert_allclose(after, before - sum(FED), rtol=1e-12)
    before, after = fed_by_numbers(fluid.optimizer.Adam, form, number)
    np.testing.assert_allclose(after, adam_by_formula(before), rtol=1e-12)


def test_a_rate_of_several_fed_numbers_is_refused_with_a_way_out() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        loss = L.mean(L.fc(fluid.data("x", [None, 4], "float32"), 1))
        with pytest.raises(ProgramError, match=r"or an input of one number \(fluid\.data\(name, \[1\]\)\)"):
            fluid.optimizer.Adam(L.reduce_mean(fluid.data("rates", [2], "float32"))).minimize(loss)
