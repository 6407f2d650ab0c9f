"""Optimizers that a script derives from `fluid.optimizer.Optimizer`, by Fluid's hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.optimizers.base import Optimizer

layers = fluid.layers


class Derived(Optimizer):
    """Momentum by appended operators. `finished`: what `_finish_update` was given."""

    def __init__(self, learning_rate: float, mu: float, **given: Any) -> None:
        super().__init__(learning_rate=learning_rate, **given)
        self.type, self._mu = "momentum", mu
        self.finished: list[str] = []

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for parameter in parameters:
            self._add_accumulator("velocity", parameter)

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        param, grad = param_and_grad
        velocity = self._get_accumulator("velocity", param)
        return block.append_op(
            type=self.type,
            inputs={
                "Param": [param], "Grad": [grad], "Velocity": [velocity],
                "LearningRate": [self._create_param_lr(param_and_grad)],
            },
            outputs={"ParamOut": [param], "VelocityOut": [velocity]},
            attrs={"mu": self._mu, "use_nesterov": False},
        )  # fmt: skip

    def _finish_update(self, block: Any, parameters_and_grads: Any) -> None:
        self.finished = [param.name for param, _ in parameters_and_grads]


def losses(optimizer: Any, mode: str, is_sparse: bool = False) -> list[np.ndarray]:
    main, startup, scope = fluid.Program(seed=3), fluid.Program(seed=3), fluid.Scope()
    with fluid.program_guard(main, startup), fluid.unique_name.guard():
        ids, y = layers.data("ids", [1], dtype="int64"), layers.data("y", [1])
        rows = layers.embedding(ids, [10, 4], is_sparse=is_sparse, param_attr="table")
        hidden = layers.fc(rows, 5, act="tanh", param_attr=fluid.ParamAttr("w", learning_rate=0.5))
        loss = layers.mean(layers.square_error_cost(layers.fc(hidden, 1), y))
        optimizer.minimize(loss)
    executor, program = fluid.Executor(fluid.CPUPlace()), main
    executor.run(startup, scope=scope)
    if mode != "executor":
        build = fluid.BuildStrategy()
        build.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
        compiled: Any = fluid.CompiledProgram(main)
        program = compiled.with_data_parallel(loss.name, build_strategy=build, places=fluid.cpu_places(2))
    draw = np.random.default_rng(0)
    feed = {"ids": draw.integers(0, 10, (8, 1)), "y": draw.normal(size=(8, 1)).astype("float32")}
    return [executor.run(program, feed, [loss], scope=scope)[0] for _ in range(5)]


@pytest.mark.parametrize("mode", ["executor", "AllReduce", "Reduce"])
def test_a_derived_momentum_equals_the_own_one(mode: str) -> None:
    given = {"regularization": fluid.regularizer.L2Decay(0.01), "grad_clip": fluid.clip.GradientClipByGlobalNorm(0.5)}
    derived = Derived(0.1, 0.9, **given)
    np.testing.assert_allclose(
        losses(derived, mode), losses(fluid.optimizer.Momentum(0.1, 0.9, **given), mode), rtol=1e-6
    )
    assert derived.finished == ["table", "w", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"]


def test_sparse_gradients_are_refused_by_the_parameters_name() -> None:
    with pytest.raises(ProgramError, match=r"sparse gradient of 'table'.*is_sparse=False"):
        losses(Derived(0.1, 0.9), "executor", is_sparse=True)


def test_accumulators_are_made_once_and_before_they_are_read() -> None:
    class Twice(Derived):
        def _create_accumulators(self, block: Any, parameters: Any) -> None:
            for parameter in (*parameters, *parameters):
                self._add_accumulator("velocity", parameter)

    class Never(Derived):
        def _create_accumulators(self, block: Any, parameters: Any) -> None:
            return

    with pytest.raises(ProgramError, match="accumulator 'velocity' of 'table' exists already"):
        losses(Twice(0.1, 0.9), "executor")
    with pytest.raises(ProgramError, match="there is no accumulator 'velocity' of 'table'"):
        losses(Never(0.1, 0.9), "executor")


def test_the_rate_of_an_optimizer_is_made_by_minimize() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        rate = layers.piecewise_decay([2, 4], [0.1, 0.01, 0.001])
        assert fluid.optimizer.Momentum(rate, 0.9)._global_learning_rate() is rate
        optimizer = fluid.optimizer.SGD(0.25)
        assert optimizer._global_learning_rate() is None
        optimizer.minimize(layers.mean(layers.fc(layers.data("x", [3]), 1)))
        made = optimizer._global_learning_rate()
        startup, scope, executor = fluid.default_startup_program(), fluid.Scope(), fluid.Executor(fluid.CPUPlace())
        executor.run(startup, scope=scope)
        (value,) = executor.run(feed={"x": np.ones((2, 3), "float32")}, fetch_list=[made], scope=scope)
    assert float(value[0]) == 0.25
