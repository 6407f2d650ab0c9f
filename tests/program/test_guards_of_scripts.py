"""What scripts do around an optimizer: schedules and weight decay of their own, and nests of variables."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import SpecError
from penstock.program.layers import nests
from penstock.program.training.schedules import decay_step_counter
from penstock.scope import Scope


def _trained_with_decay_of_its_own(strategy: str | None) -> tuple[list[float], np.ndarray]:
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 2], "float64")
        fc = fluid.layers.fc(x, 1, param_attr=fluid.ParamAttr("w", fluid.initializer.Constant(0.5)), bias_attr=False)
        loss = fluid.layers.mean(fc)
        with main._lr_schedule_guard():
            rate: Any = fluid.layers.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
            step = decay_step_counter()
            with fluid.layers.Switch() as switch:
                with switch.case(step < 2):
                    fluid.layers.assign(0.25 * (step + 1.0), rate)
                with switch.default():
                    fluid.layers.assign(fluid.layers.polynomial_decay(0.5, 4, 0.0), rate)
        before = {p.name: p * 1.0 for p in main.global_block().all_parameters()}
        _, pairs = fluid.optimizer.SGD(rate).minimize(loss)
        for param, gradient in pairs:
            with param.block.program._optimized_guard([param, gradient]):
                fluid.layers.assign(param - before[param.name] * 0.5, param)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    program: Any = main
    if strategy is not None:
        build = fluid.BuildStrategy()
        build.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, strategy)
        program = fluid.CompiledProgram(main).with_data_parallel(
            loss.name, build_strategy=build, places=[fluid.CPUPlace()] * 2
        )
    rates = [float(exe.run(program, {"x": np.ones((2, 2))}, [rate], scope=scope)[0][0]) for _ in range(4)]
    return rates, scope.var("w").tensor.ravel().numpy()


@pytest.mark.parametrize("strategy", [None, "AllReduce", "Reduce"])
def test_rates_and_decays_of_a_script_are_part_of_the_update(strategy: str | None) -> None:
    expected, weight = [0.25, 0.5, 0.25, 0.125], 0.5
    rates, found = _trained_with_decay_of_its_own(strategy)
    for rate in expected:
        weight = weight - rate - 0.5 * weight  # the gradient is 1, and the decay is of the weight before the update
    np.testing.assert_allclose(rates, expected)
    np.testing.assert_allclose(found, [weight, weight], rtol=1e-12)


def test_operators_of_a_guard_have_its_role_and_pair() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, 2])
        with main._optimized_guard(["w", "w@GRAD"]):
            fluid.layers.relu(x)
        assert main.operators[-1].role_vars == (("w", "w@GRAD"),)
        assert not decay_step_counter(3).shape[1:]
        with main._lr_schedule_guard(is_with_opt=True):
            fluid.layers.relu(x)
    roles = [str(op.role) for op in main.operators]
    assert "OPTIMIZE" in roles[0]
    assert "LR_SCHED" in roles[1]
    assert "OPTIMIZE|LR_SCHED" in roles[-1]


_Pair = namedtuple("_Pair", "left right")


def test_nests_are_mapped_in_the_order_of_their_keys() -> None:
    nest = [{"b": 1, "a": (2, 3)}, _Pair(4, "five")]
    assert nests.flatten(nest) == [2, 3, 1, 4, "five"]
    doubled = nests.map_structure(lambda one, other: one + other, nest, nest)
    assert doubled == [{"b": 2, "a": (4, 6)}, _Pair(8, "fivefive")]
    assert list(doubled[0]) == ["b", "a"]
    assert nests.pack_sequence_as(0, [7]) == 7
    with pytest.raises(SpecError, match="2 values do not fill"):
        nests.pack_sequence_as(nest, [1, 2])


@pytest.mark.parametrize(
    ("other", "text"),
    [(3, "only one of them"), ([1, 2], "keys|tuple"), ((1,), "2 and 1 parts"), ((1, [2]), "only one of them")],
)
def test_nests_of_other_structure_are_refused(other: Any, text: str) -> None:
    nests.assert_same_structure((1, 2), (3, 4))
    nests.assert_same_structure((1, 2), [3, 4], check_types=False)
    with pytest.raises(SpecError, match=text):
        nests.assert_same_structure((1, 2), other)
    with pytest.raises(SpecError, match="keys"):
        nests.assert_same_structure({"a": 1}, {"b": 1})
