"""The check mode names the first operator that made a NaN or an Inf, in Executor and on replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.networks import Network, conv_net, ctr_dnn, transformer
from tests.property.oracle import copy_of, intra_op_threads, same_bits, started, value

import penstock as fluid
from penstock.errors import OperatorError, SpecError
from penstock.exec import diagnostics, flags
from penstock.program.program import Program
from penstock.scope import Scope


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    before = dict(flags._set)
    yield
    flags._set.clear()
    flags._set.update(before)


@pytest.fixture
def checked() -> None:
    fluid.set_flags({"FLAGS_check_nan_inf": True})


def logarithm() -> tuple[Program, Program, Any]:
    """The mean of log(x w) with w = 1: trained by SGD, so that zeros in x give -inf, and negative ones NaN."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[3])
        weight = fluid.ParamAttr(name="w", initializer=fluid.initializer.Constant(1.0))
        score = fluid.layers.fc(x, 1, param_attr=weight, bias_attr=False)
        loss = fluid.layers.mean(torch.log(score))
        fluid.optimizer.SGD(0.1).minimize(loss)
    return main, startup, loss


Run = Callable[[Program, Any, dict[str, Any], Scope], list[Any]]


def by_executor(main: Program, loss: Any, feed: dict[str, Any], scope: Scope) -> list[Any]:
    return list(fluid.Executor().run(main, feed, [loss], scope=scope))


def by_replicas(main: Program, loss: Any, feed: dict[str, Any], scope: Scope) -> list[Any]:
    engine = fluid.ParallelExecutor(False, getattr(loss, "name", loss), main, scope=scope)
    try:
        return list(engine.run([loss], feed))
    finally:
        engine.close()


@pytest.fixture(params=[by_executor, by_replicas])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("CPU_NUM", "2")
    return request.param  # type: ignore[no-any-return]  # one of the two


@pytest.mark.parametrize(("worst", "state"), [(-1.0, "NaN"), (0.0, "Inf")])
@pytest.mark.usefixtures("checked")
def test_the_first_operator_is_named_with_its_line_and_operands(run: Run, worst: float, state: str) -> None:
    main, startup, loss = logarithm()
    scope = started(startup)
    feed = np.full((4, 3), 1.0, "float32")
    feed[3] = worst
    with pytest.raises(OperatorError) as raised:
        run(main, loss, {"x": feed}, scope)
    error = raised.value
    assert error.operator.startswith("aten_log_0")
    assert error.source.startswith("test_nan_check.py:")
    assert error.state == state
    operand = main.operators[[op.name for op in main.operators].index("aten_log_0")].input_names()[0]
    assert error.finite == {operand: True}
    rows = 4 if run is by_executor else 2
    assert error.shapes == {operand: f"float32[{rows}, 1]"}
    assert error.replica == (0 if run is by_executor else 1)
    assert f"made {state}" in str(error)
    assert f"1 of {rows} elements" in str(error)
    assert same_bits(value(scope, "w"), torch.ones(3, 1))


@pytest.mark.usefixtures("checked")
def test_operands_that_had_one_before_are_told_from_finite_ones(run: Run) -> None:
    main, startup, loss = logarithm()
    feed = np.ones((4, 3), "float32")
    feed[:, 1] = np.nan
    with pytest.raises(
        OperatorError, match=r"passed on NaN.*\n.*'x' float32\[\d, 3\] with NaN before.*'w'.* finite"
    ) as raised:
        run(main, loss, {"x": feed}, started(startup))
    assert raised.value.finite == {"x": False, "w": True}


@pytest.mark.usefixtures("checked")
def test_an_infinite_parameter_is_no_excuse(run: Run) -> None:
    main, startup, loss = logarithm()
    scope = started(startup)
    value(scope, "w").fill_(torch.inf)
    with pytest.raises(OperatorError, match="Inf") as raised:
        run(main, loss, {"x": np.ones((4, 3), "float32")}, scope)
    assert raised.value.finite["w"] is False


@pytest.mark.usefixtures("checked")
def test_a_fault_of_the_backward_pass_leaves_parameters_alone(run: Run) -> None:
    """sqrt(0) is fine, its derivative is not."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[2])
        weight = fluid.ParamAttr(name="w", initializer=fluid.initializer.Constant(0.0))
        loss = fluid.layers.mean(torch.sqrt(fluid.layers.fc(x, 1, param_attr=weight, bias_attr=False)))
        fluid.optimizer.Adam(0.1).minimize(loss)
    scope = started(startup)
    with pytest.raises(OperatorError, match=r"made (Inf|NaN)") as raised:
        run(main, loss, {"x": np.ones((4, 2), "float32")}, scope)
    assert raised.value.source.startswith("test_nan_check.py:")
    assert same_bits(value(scope, "w"), torch.zeros(2, 1))


@pytest.mark.usefixtures("checked")
def test_masks_of_infinity_are_no_fault(run: Run) -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[3])
        scores = x.masked_fill(x > 1.5, float("-inf"))
        loss = fluid.layers.mean(torch.softmax(scores + 1.0, -1))
    got = run(main, loss, {"x": np.array([[0, 1, 2]] * 4, "float32")}, started(startup))
    assert np.allclose(got[0], 1 / 3)


@pytest.mark.parametrize("make", [ctr_dnn, conv_net, transformer])
@pytest.mark.parametrize("mode", list(fluid.BuildStrategy.ReduceStrategy))
def test_a_checked_run_equals_an_unchecked_one(
    make: Callable[[], Network], mode: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    network = make()
    start = started(network.startup)
    build = fluid.BuildStrategy()
    build.reduce_strategy = mode
    found: list[tuple[list[Any], Scope]] = []
    for check in (False, True):
        fluid.set_flags({"FLAGS_check_nan_inf": check})
        scope = copy_of(start)
        engine = fluid.ParallelExecutor(False, network.loss, network.main, scope=scope, build_strategy=build)
        try:
            with intra_op_threads(engine.core.intra_op_threads):
                runs = [engine.run(network.all_fetches, network.feed(5, n)) for n in range(3)]
        finally:
            engine.close()
        found.append((runs, scope))
    (plain, left), (slow, right) = found
    assert all(a.tobytes() == b.tobytes() for x, y in zip(plain, slow, strict=True) for a, b in zip(x, y, strict=True))
    assert all(same_bits(value(left, n), value(right, n)) for n in left.names())


def test_kernels_that_fail_keep_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    monkeypatch.setenv("PENSTOCK_CHECK_NAN", "1")
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
        out = fluid.layers.mean(fluid.layers.embedding(ids, [4, 2]))
    with pytest.raises(OperatorError, match="failed"):
        by_replicas(main, out, {"ids": np.array([[9]])}, started(startup))


def test_the_environment_and_set_flags_turn_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CHECK_NAN", raising=False)
    monkeypatch.delenv("FLAGS_check_nan_inf", raising=False)
    assert not diagnostics.checks_results()
    monkeypatch.setenv("PENSTOCK_CHECK_NAN", "1")
    assert diagnostics.checks_results()
    fluid.set_flags({"FLAGS_check_nan_inf": 0})
    assert fluid.get_flags("FLAGS_check_nan_inf") == {"FLAGS_check_nan_inf": False}
    with pytest.raises(SpecError, match=r"'FLAGS_benchmarks' has no effect.*FLAGS_check_nan_inf"):
        fluid.set_flags({"FLAGS_check_nan_inf": True, "FLAGS_benchmarks": True})
    with pytest.raises(SpecError, match="FLAGS_check_nan_inf is 'maybe'; expected 1 or 0"):
        fluid.set_flags({"FLAGS_check_nan_inf": "maybe"})
    assert not diagnostics.checks_results()


def test_states_of_integers_and_complex_numbers() -> None:
    assert diagnostics.state_of(torch.tensor([1])) == "finite"
    assert diagnostics.state_of(torch.tensor([1.0, torch.inf])) == "Inf"
    assert diagnostics.state_of(torch.tensor([torch.nan, torch.inf])) == "NaN"
    assert diagnostics.state_of(torch.tensor([complex(0, torch.nan)])) == "NaN"
    assert diagnostics.state_of(torch.empty(0)) == "finite"
