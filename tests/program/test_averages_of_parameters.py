"""Averages of parameters and optimizers around optimizers, against the same sums in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError

STEPS = 9


class Training:
    """A line that is trained; `around` gives what is to be made of the optimizer, `behind` what follows minimize."""

    def __init__(self, around: Callable[[Any], Any] = lambda o: o, behind: Callable[[], Any] = lambda: None) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = self.startup.random_seed = 3
        with fluid.program_guard(self.main, self.startup):
            x, y = fluid.layers.data("x", [3], dtype="float64"), fluid.layers.data("y", [1], dtype="float64")
            predict = fluid.layers.fc(x, 1, param_attr="w", bias_attr=False)
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(predict, y))
            around(fluid.optimizer.SGD(0.05)).minimize(self.loss)
            self.behind = behind()
        self.exe = fluid.Executor()
        self.exe.run(self.startup, scope=self.scope)

    def weights(self) -> np.ndarray:
        return np.array(self.scope.find_var("w")).ravel()

    def train(self, replicas: int) -> list[np.ndarray]:
        """Return the weights before the first step and after each."""
        compiled = fluid.CompiledProgram(self.main).with_data_parallel(
            self.loss.name, places=fluid.cpu_places(max(replicas, 1))
        )
        found = [self.weights()]
        for step in range(STEPS):
            random = np.random.default_rng(step)
            feed = {"x": random.normal(size=(4, 3)), "y": random.normal(size=(4, 1))}
            self.exe.run(compiled if replicas else self.main, feed=feed, scope=self.scope)
            found.append(self.weights())
        return found


def applied(training: Training) -> np.ndarray:
    """Return the averages, and see that the parameters come back."""
    before = training.weights()
    with fluid.scope_guard(training.scope):
        with training.behind.apply(training.exe):
            averages = training.weights()
        np.testing.assert_array_equal(training.weights(), before)
        with training.behind.apply(training.exe, need_restore=False):
            pass
        np.testing.assert_array_equal(training.weights(), averages)
        training.behind.restore(training.exe)
    np.testing.assert_array_equal(training.weights(), before)
    return averages


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("limited", [False, True])
def test_an_exponential_average_is_corrected(replicas: int, limited: bool) -> None:
    def behind() -> Any:
        steps = fluid.layers.create_global_var([1], 2.0, "float32", persistable=True) if limited else None
        average = fluid.optimizer.ExponentialMovingAverage(0.9, thres_steps=steps)
        average.update()
        return average

    training = Training(behind=behind)
    decay = float(np.float32(0.25)) if limited else float(np.float32(0.9))
    ema = np.zeros(3)
    for weights in training.train(replicas)[1:]:
        ema = decay * ema + (1 - decay) * weights
    np.testing.assert_allclose(applied(training), ema / (1 - decay**STEPS), rtol=1e-6)


@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize(("rate", "least", "most", "terms"), [(1.0, 100, 100, 9), (0.5, 2, 4, 5), (0.01, 4, 4, 5)])
def test_a_model_average_is_that_of_its_window(replicas: int, rate: float, least: int, most: int, terms: int) -> None:
    training = Training(behind=lambda: fluid.optimizer.ModelAverage(rate, least, most))
    history = training.train(replicas)[1:]
    np.testing.assert_allclose(applied(training), np.mean(history[-terms:], axis=0), rtol=1e-12)


@pytest.mark.parametrize("kind", ["ExponentialMovingAverage", "ModelAverage"])
def test_a_parameter_that_wants_no_average_has_none(kind: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        x = fluid.layers.data("x", [2], dtype="float64")
        own = fluid.ParamAttr("b", do_model_average=False)
        loss = fluid.layers.mean(fluid.layers.fc(x, 1, param_attr="w", bias_attr=own))
        fluid.optimizer.SGD(0.5).minimize(loss)
        average: Any = getattr(fluid.optimizer, kind)(0.5)
        if kind == "ExponentialMovingAverage":
            average.update()
        exe = fluid.Executor()
        exe.run(fluid.default_startup_program())
        for _ in range(3):
            exe.run(feed={"x": np.ones((4, 2))})
        before = {name: np.array(fluid.global_scope().find_var(name)) for name in ("w", "b")}
        with average.apply(exe):
            after = {name: np.array(fluid.global_scope().find_var(name)) for name in ("w", "b")}
    np.testing.assert_array_equal(after["b"], before["b"])
    assert (after["w"] != before["w"]).all()


def test_averages_need_parameters() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        with pytest.raises(ProgramError, match="finds no trained parameters"):
            fluid.optimizer.ExponentialMovingAverage().update()
        with pytest.raises(ProgramError, match=r"make it behind minimize\(\)"):
            fluid.optimizer.ModelAverage(0.15)


@pytest.mark.parametrize("replicas", [0, 2])
def test_lookahead_mixes_every_k_steps(replicas: int) -> None:
    plain = Training()
    ahead = Training(around=lambda inner: fluid.optimizer.LookaheadOptimizer(inner, alpha=0.25, k=3))
    np.testing.assert_array_equal(plain.weights(), ahead.weights())
    slow = ahead.weights()
    history = ahead.train(replicas)
    for step in range(STEPS):
        plain.scope.var("w").set(history[step].reshape(3, 1))
        random = np.random.default_rng(step)
        feed = {"x": random.normal(size=(4, 3)), "y": random.normal(size=(4, 1))}
        plain.exe.run(plain.main, feed=feed, scope=plain.scope)
        want = plain.weights()
        if (step + 1) % 3 == 0:
            want = slow = 0.25 * want + 0.75 * slow
        np.testing.assert_allclose(history[step + 1], want, rtol=1e-12)
    with pytest.raises(ProgramError, match=r"alpha is 1\.5"):
        fluid.optimizer.LookaheadOptimizer(fluid.optimizer.SGD(0.1), alpha=1.5)
