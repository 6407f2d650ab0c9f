"""Bad input ends in one clear message that names the thing, its place and what to do (Must show 6, the core's part)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.property.networks import Network, ctr_dnn, fit_a_line
from tests.property.oracle import started

import penstock as fluid
from penstock.errors import FeedError, FetchError, OperatorError, PenstockError, ProgramError, SpecError, UserError
from penstock.scope import Scope

FLOATS = np.zeros((2, 13), "float32")
TARGET = np.zeros((2, 1), "float32")

Run = Callable[..., Any]


@pytest.fixture(params=["Executor", "ParallelExecutor"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run one step of fit-a-line with a feed and a fetch list."""
    monkeypatch.setenv("CPU_NUM", "2")
    network = fit_a_line()
    scope = started(network.startup)
    if request.param == "Executor":
        yield lambda feed, fetch=(): fluid.Executor().run(network.main, feed, list(fetch), scope=scope)
        return
    parallel = fluid.ParallelExecutor(False, network.loss, network.main, scope=scope)
    yield lambda feed, fetch=(): parallel.run(list(fetch), feed)
    parallel.close()


def message(kind: type[PenstockError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - errors travel between processes of one job
    assert (type(again), str(again)) == (kind, str(caught.value))
    assert isinstance(caught.value, UserError)
    return str(caught.value)


def test_an_unknown_feed_names_close_and_known_inputs(run: Run) -> None:
    text = message(FeedError, lambda: run({"x": FLOATS, "y": TARGET, "xx": FLOATS}))
    assert text == "feed 'xx': variable 'xx' is not in the program. Did you mean 'x'? Its inputs are 'x', 'y'."


def test_a_missing_feed_names_declaration_and_form(run: Run) -> None:
    text = message(FeedError, lambda: run({"x": FLOATS}))
    assert "input 'y' (declared at networks.py:" in text
    assert text.endswith("is not fed; feed it as float32[-1, 1]")


@pytest.mark.parametrize("shape", [(2, 12), (2,), (2, 13, 2)])
def test_a_wrong_shape_names_both_shapes_and_the_declaration(shape: tuple[int, ...], run: Run) -> None:
    text = message(FeedError, lambda: run({"x": np.zeros(shape, "float32"), "y": TARGET}))
    assert text.startswith(
        f"feed 'x' has shape {list(shape)}, but the program expects float32[-1, 13] (declared at networks.py:"
    )


def test_a_wrong_dtype_names_both_and_the_conversion(run: Run) -> None:
    text = message(FeedError, lambda: run({"x": FLOATS.astype("float64"), "y": TARGET}))
    assert "feed 'x' is float64[2, 13], but the program expects float32[-1, 13]" in text
    assert "value.astype('float32')" in text


def test_feeds_of_different_length_name_both(run: Run) -> None:
    text = message(FeedError, lambda: run({"x": FLOATS, "y": np.zeros((3, 1), "float32")}))
    assert "feeds 'x' and 'y' must have the same number of rows, but have 2 and 3" in text


def test_a_fetch_that_is_not_in_the_program_names_close_ones(run: Run) -> None:
    text = message(FetchError, lambda: run({"x": FLOATS, "y": TARGET}, ["fc_0.w_1"]))
    assert text.startswith("fetch 'fc_0.w_1': variable 'fc_0.w_1' is not in the program. Did you mean 'fc_0.w_0'")


def test_a_fetch_that_is_no_variable_is_shown(run: Run) -> None:
    text = message(FetchError, lambda: run({"x": FLOATS, "y": TARGET}, [3]))
    assert text == "fetch_list holds 3 (int); expected a variable or its name"


def test_feeds_survive_an_error_and_the_next_run_works(run: Run) -> None:
    message(FeedError, lambda: run({"x": FLOATS}))
    assert np.isfinite(run({"x": FLOATS, "y": TARGET}, ["mean_0.tmp_0"])[0]).all()


def unstarted(network: Network, parallel: bool) -> Any:
    if not parallel:
        return fluid.Executor().run(network.main, network.feed(2, 0), scope=Scope())
    executor = fluid.ParallelExecutor(False, network.loss, network.main, scope=Scope())
    try:
        return executor.run([], network.feed(2, 0))
    finally:
        executor.close()


@pytest.mark.parametrize("parallel", [False, True])
def test_a_startup_program_that_was_not_run_is_named(parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    text = message(ProgramError, lambda: unstarted(fit_a_line(), parallel))
    assert "'fc_0." in text
    assert "(created at networks.py:" in text
    assert "has no value yet. Run the startup program first: exe.run(fluid.default_startup_program())" in text


def test_an_executor_error_names_operator_shapes_and_line() -> None:
    network = ctr_dnn(metrics=False)
    bad = network.feed(2, 0)
    bad["slot2"][1] = -1
    text = message(OperatorError, lambda: fluid.Executor().run(network.main, bad, scope=started(network.startup)))
    assert "(penstock.lookup_table.default), recorded at networks.py:" in text
    assert "embedding_2.w_0 float32[30, 4]" in text


def _set(strategy: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(strategy, name, value)


@pytest.mark.parametrize("kind", [fluid.ExecutionStrategy, fluid.BuildStrategy])
def test_an_unknown_strategy_field_is_named_with_the_known_ones(kind: type) -> None:
    text = message(SpecError, _set(kind(), "num_thread", 2))
    close = {fluid.ExecutionStrategy: "num_threads", fluid.BuildStrategy: "num_trainers"}[kind]
    assert text.startswith(f"{kind.__name__} has no field 'num_thread' (did you mean '{close}'?); it has ")
    assert ("num_threads" in text) == (kind is fluid.ExecutionStrategy)


@pytest.mark.parametrize(
    ("strategy", "field", "value", "expected"),
    [
        (fluid.ExecutionStrategy(), "num_threads", "4", "int"),
        (fluid.ExecutionStrategy(), "num_threads", -1, "int"),
        (fluid.ExecutionStrategy(), "num_threads", True, "int"),
        (fluid.BuildStrategy(), "reduce_strategy", 1, "one of AllReduce, Reduce"),
        (fluid.BuildStrategy(), "memory_optimize", 1, "True, False or None"),
        (fluid.BuildStrategy(), "debug_graphviz_path", 3, "str"),
    ],
)
def test_a_strategy_field_of_the_wrong_type_shows_the_expected(
    strategy: Any, field: str, value: Any, expected: str
) -> None:
    text = message(SpecError, _set(strategy, field, value))
    assert text == f"{type(strategy).__name__}.{field} is {value!r}; expected {expected}"


@pytest.mark.parametrize("wrong", ["0", "two", "-1", "1.5", "²"])
def test_a_wrong_cpu_num_is_shown(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", wrong)
    network = fit_a_line()
    text = message(SpecError, lambda: fluid.ParallelExecutor(False, network.loss, network.main, scope=Scope()))
    assert text == f"the environment variable CPU_NUM is {wrong!r}; expected a whole number from 1 on"


def test_an_empty_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    network = fit_a_line()
    executor = fluid.ParallelExecutor(False, network.loss, network.main, scope=started(network.startup))
    empty = {"x": FLOATS[:0], "y": TARGET[:0]}
    try:
        assert "has no rows; feed at least one" in message(FeedError, lambda: executor.run([], empty))
        assert "has no rows; feed at least one" in message(FeedError, lambda: executor.run([], [empty, empty]))
    finally:
        executor.close()


def test_use_cuda_without_a_gpu_says_what_to_pass() -> None:
    network = fit_a_line()
    text = message(SpecError, lambda: fluid.ParallelExecutor(True, network.loss, network.main))
    assert text.startswith("use_cuda=True: ")
    assert "pass use_cuda=False" in text


def test_a_closed_executor_says_so() -> None:
    exe = fluid.Executor()
    exe.close()
    assert "was closed; make another one" in message(UserError, lambda: exe.run(fit_a_line().main))


def test_an_operator_type_that_torch_lacks_is_named() -> None:
    program = fluid.Program.parse(
        "program version=1 seed=1 symbols=[]\nvar y : float32[] \nop a aten.no_such.default() -> %y role=FORWARD\n"
    )
    assert "operator 'a': 'aten.no_such.default' is unknown to torch" in message(
        ProgramError, lambda: fluid.Executor().run(program, scope=Scope())
    )
