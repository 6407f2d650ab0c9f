"""What libraries on top of Fluid do: private names, copies of parameters between networks, truths as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FeedError, ProgramError


def test_private_names_that_libraries_call() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.layers.data("x", [3])
        fluid.layers.fc(x, 2, param_attr="w", bias_attr=False)
        assert fluid.framework._get_var("w").shape == (3, 2)
    attr = fluid.ParamAttr("own")
    assert [one and one.name for one in fluid.ParamAttr._to_attr([attr, "named", None, False])] == [
        "own", "named", None, False,
    ]  # fmt: skip


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_program_without_inputs_writes_parameters(num_replicas: int) -> None:
    startup, follow, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    constant = fluid.initializer.Constant
    with fluid.program_guard(follow, startup):
        source = fluid.layers.create_parameter([3], "float32", "source", default_initializer=constant(1.0))
        target = fluid.layers.create_parameter([3], "float32", "target", default_initializer=constant(0.0))
        fluid.layers.assign(0.5 * target + 0.5 * source, target)
        with pytest.raises(ProgramError, match=r"input 'x' is declared in a program that writes .*'target'"):
            fluid.data("x", [None, 3], "float32")
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(startup, scope=scope)
    runs: Any = follow
    if num_replicas > 1:
        compiled: Any = fluid.CompiledProgram(follow)
        runs = compiled.with_data_parallel(places=[fluid.CPUPlace()] * num_replicas)
    for wanted in (0.5, 0.75):
        executor.run(runs, scope=scope)
        np.testing.assert_allclose(np.array(scope.find_var("target")), [wanted] * 3)


def test_ones_and_zeros_are_fed_for_truths_of_layers_data() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        done, strict = fluid.layers.data("done", [], dtype="bool"), fluid.data("strict", [None], "bool")
        outputs = [fluid.layers.cast(one, "float32") for one in (done, strict)]
        executor, main = fluid.Executor(fluid.CPUPlace()), fluid.default_main_program()
        ones = np.array([1.0, 0.0], "float32")
        found, _ = executor.run(main, {"done": ones, "strict": ones.astype(bool)}, outputs)
        np.testing.assert_array_equal(found, ones)
        for wrong in ({"done": ones, "strict": ones}, {"done": ones * 2, "strict": ones.astype(bool)}):
            with pytest.raises(FeedError, match="expects bool"):
                executor.run(main, wrong, outputs)


def _copied(then: Callable[[Any], Any], first: Callable[[Any], Any]) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        w = fluid.layers.create_parameter([3], "float32", "w")
        first(w)
        then(w)


def _halve(w: Any) -> None:
    fluid.layers.assign(w * 0.5, w)


def _train(w: Any) -> None:
    fluid.optimizer.SGD(0.3).minimize(fluid.layers.reduce_mean(w * w))


def test_what_a_program_without_inputs_copies_it_does_not_train() -> None:
    with pytest.raises(ProgramError, match="Write it in a program of its own"):
        _copied(_train, _halve)
    with pytest.raises(ProgramError, match="writes the trainable parameter 'w' in place"):
        _copied(_halve, _train)
