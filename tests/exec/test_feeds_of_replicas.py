"""What one feed holds for several replicas besides rows: persistable inputs, and inputs of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FeedError


def test_each_replica_may_be_fed_its_own_persistable_input() -> None:
    main, scope, exe = fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        rate = fluid.data("rate", [1])
        rate.persistable = True
        product = fluid.data("x", [None, 1]) * rate
    program = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()] * 3)
    x, rates = np.ones((3, 1), "float32"), np.array([2.0, 3.0, 4.0], "float32")
    listed = [{"x": x[:1], "rate": rates[i : i + 1]} for i in range(3)]
    fed: list[tuple[Any, list[float]]] = [
        (listed, [2, 3, 4]),
        (listed[1:], [3, 4]),
        ({"x": x, "rate": rates}, [2, 3, 4]),
        ({"x": x}, [2, 3, 4]),  # as the run before has left them
        ({"x": x, "rate": rates[2:]}, [4, 4, 4]),
    ]
    for feed, expected in fed:
        assert exe.run(program, feed, [product], scope=scope)[0].ravel().tolist() == expected
    assert scope.find("rate").tolist() == [4.0], "that of the first replica"
    with pytest.raises(FeedError, match="'rate' has 2 entries, but 3 replicas have rows"):
        exe.run(program, {"x": x, "rate": rates[:2]}, [product], scope=scope)
    assert scope.find("rate").tolist() == [4.0]


@pytest.mark.parametrize("varies", [False, True])
def test_inputs_of_fixed_size_are_fed_for_all_replicas_at_once(varies: bool) -> None:
    main, exe, scope = fluid.Program(), fluid.Executor(), fluid.Scope()
    with fluid.program_guard(main, fluid.Program()):
        fetches = [fluid.data("x", [2, 3]).sum(1, keepdim=True), fluid.data("y", [None if varies else 2, 1]) * 2]
    program = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()] * 3)
    for rows in (6,) if varies else (4, 6):  # a batch that varies is split over all replicas
        x, y = np.arange(3.0 * rows, dtype="float32").reshape(rows, 3), np.arange(rows, dtype="float32")[:, None]
        sums, doubles = exe.run(program, {"x": x, "y": y}, fetches, scope=scope)
        assert np.array_equal(sums, x.sum(1, keepdims=True))
        assert np.array_equal(doubles, 2 * y)
    for rows, problem in ((5, r"'x' has shape \[5, 3\]"), (4, "'x' has the rows of 2 replicas, 2 for each, but what")):
        with pytest.raises(FeedError, match=problem):
            exe.run(program, {"x": x[:rows], "y": y}, fetches, scope=scope)


@pytest.mark.parametrize("entries", [1, 2])
def test_an_input_written_in_place_is_each_replicas_own(entries: int) -> None:
    main, exe, scope = fluid.Program(), fluid.Executor(), fluid.Scope()
    with fluid.program_guard(main, fluid.Program()):
        total = fluid.data("total", [1])
        x = fluid.data("x", [None, 1])
        fluid.layers.increment(total)
        fetches = [total, x + total]
    program = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()] * 2)
    fed, x = np.zeros(entries, "float32"), np.zeros((4, 1), "float32")
    for _ in range(2):
        totals, sums = exe.run(program, {"x": x, "total": fed}, fetches, scope=scope)
        assert totals.tolist() == [1.0, 1.0]
        assert sums.ravel().tolist() == [1.0] * 4
        assert not fed.any(), "the script's array"


def test_a_list_of_one_dict_is_counted_as_a_dict_is() -> None:
    main, exe, scope = fluid.Program(), fluid.Executor(), fluid.Scope()
    with fluid.program_guard(main, fluid.Program()):
        rate = fluid.data("rate", [1])
        rate.persistable = True
        product = fluid.data("x", [None, 1]) * rate
    program = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()] * 3)
    x = np.ones((3, 1), "float32")
    with pytest.raises(FeedError, match="'rate' has 2 entries, but 1 replicas have rows"):
        exe.run(program, [{"x": x, "rate": np.ones(2, "float32")}], [product], scope=scope)


def assigned(rate: Any) -> Any:
    """A persistable number that a branch assigns."""
    made = fluid.layers.create_global_var([1], 0.0, "float32", persistable=True, name="assigned")
    with fluid.layers.Switch() as switch, switch.case(rate > 0.0):
        fluid.layers.assign(rate * 0.5, made)
    return made


def kept(rate: Any) -> Any:
    rate.persistable = True
    return rate


RATES: dict[str, Callable[[Any], Any]] = {
    "fed": lambda rate: rate,
    "computed": lambda rate: rate * 0.5,
    "with a schedule": lambda rate: rate * fluid.layers.exponential_decay(0.5, 1, 0.5),
    "assigned": assigned,
    "persistable": kept,
}


@pytest.mark.parametrize("made", RATES)
def test_a_learning_rate_is_fed_as_one_number_for_all_replicas(made: str) -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        rate, scale = fluid.data("rate", [1]), fluid.data("scale", [1])
        loss = fluid.layers.mean(fluid.layers.fc(fluid.data("x", [None, 2]) * scale, 1, param_attr="w"))
        fluid.optimizer.SGD(RATES[made](rate)).minimize(loss)
    exe.run(startup, scope=scope)
    program = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=[fluid.CPUPlace()] * 3)
    x, scales, before = np.ones((3, 2), "float32"), np.arange(3.0, dtype="float32"), np.array(scope.find_var("w"))

    def forms(rates: np.ndarray) -> tuple[Any, Any]:
        one = {"x": x, "scale": scales, "rate": rates}
        return one, [{name: value[i : i + 1] for name, value in one.items()} for i in range(3)]

    for feed in forms(np.array([0.5, 0.5, 0.25], "float32")):
        with pytest.raises(FeedError, match=r"'rate' .*is fed 0\.5, 0\.5, 0\.25 for 3 .*Feed the same number to all"):
            exe.run(program, feed, [loss], scope=scope)
    assert np.array_equal(np.array(scope.find_var("w")), before)
    for feed in (*forms(np.array([0.5, 0.5, 0.5], "float32")), {"x": x, "scale": scales, "rate": scales[1:2]}):
        exe.run(program, feed, [loss], scope=scope)
    assert not np.array_equal(np.array(scope.find_var("w")), before)
