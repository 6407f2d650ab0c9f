"""Mistakes of a first script: each message names the thing, its shape or value, the user's line, and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as fluid
from penstock.errors import FeedError, FetchError, OperatorError, ProgramError, RecordError, SpecError, UserError

layers = fluid.layers
HERE = r"test_first_script_errors\.py:\d+"


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two replicas, and programs and a scope of their own."""
    monkeypatch.setenv("CPU_NUM", "2")
    with fluid.scope_guard(fluid.Scope()), fluid.program_guard(fluid.Program(), fluid.Program()):
        yield


def message(kind: type[UserError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def x13() -> Any:
    return layers.data("x", [13])


WRONG_LAYERS: dict[str, tuple[Callable[[], Any], str]] = {
    "features of too few dimensions": (
        lambda: layers.fc(layers.data("x", [4]), 5, num_flatten_dims=3),
        rf"{HERE}: fc_0 needs an input of more than 3 dimensions; got 'x' float32\[-1, 4\] \(made at {HERE}\)",
    ),
    "features that are ids": (
        lambda: layers.fc(layers.data("x", [4], dtype="int64"), 5),
        rf"{HERE}: fc_0 needs floating numbers; got 'x' int64\[-1, 4\] .* Cast it \(layers\.cast\), or look ids up",
    ),
    "an array in place of an input": (
        lambda: layers.fc(np.zeros((1, 2), "float32"), 5),
        rf"{HERE}: fc_0 needs a variable.*ndarray.*feed the array to run\(\)",
    ),
    "a label that is a float": (
        lambda: layers.cross_entropy(layers.fc(x13(), 3, act="softmax"), layers.data("label", [1])),
        rf"{HERE}: cross_entropy needs a label int64\[-1, 1\] for 'fc_softmax_0\.tmp_0' float32\[-1, 3\] "
        rf"\(made at {HERE}\); got 'label' float32\[-1, 1\] .*dtype='int64'",
    ),
    "one-hot labels": (
        lambda: layers.softmax_with_cross_entropy(layers.fc(x13(), 3), layers.data("label", [3], dtype="int64")),
        r"got 'label' int64\[-1, 3\] .* or pass soft_label=True",
    ),
    "a target that would be broadcast": (
        lambda: layers.square_error_cost(layers.fc(x13(), 1), layers.data("y", [2])),
        rf"{HERE}: square_error_cost needs two inputs of one shape; .*float32\[-1, 1\] .*; got 'y' float32\[-1, 2\]",
    ),
    "ids that are floats": (
        lambda: layers.embedding(layers.data("ids", [1]), [10, 4]),
        rf"{HERE}: embedding needs ids, int64\[-1, 1\]; got 'ids' float32\[-1, 1\]",
    ),
    "a table of one size": (
        lambda: layers.embedding(layers.data("ids", [1], dtype="int64"), 10),
        rf"{HERE}: embedding needs a table of two sizes, \[rows, width\]; got size=10",
    ),
    "a loss that is no scalar": (
        lambda: fluid.optimizer.SGD(0.1).minimize(layers.fc(x13(), 1)),
        rf"{HERE}: SGDOptimizer\.minimize needs a scalar loss, but 'addmm_0\.tmp_0' is float32\[-1, 1\] "
        rf"\(made at {HERE}\)\. Take its mean or sum first",
    ),
    "a loss by its name": (
        lambda: fluid.optimizer.SGD(0.1).minimize("loss"),
        rf"{HERE}: SGDOptimizer\.minimize needs the variable of the loss, .*; got 'loss' \(str\)",
    ),
    "a learning rate that is no number": (
        lambda: fluid.optimizer.SGD([0.1, 0.2]).minimize(layers.mean(layers.fc(x13(), 1))),
        rf"{HERE}: SGDOptimizer: learning rate is \[0\.1, 0\.2\]; expected one number, or a schedule",
    ),
    "a learning rate of two elements": (
        lambda: fluid.optimizer.SGD(layers.create_global_var([2], 0.1, "float32", persistable=True)).minimize(
            layers.mean(layers.fc(x13(), 1))
        ),
        r"learning rate Variable\('global_var_0', \[2\], float32\) must be one persistable number",
    ),
    "sizes that are no whole numbers": (
        lambda: layers.create_parameter([1.0, 2.0], "float32"),
        rf"{HERE}: create_parameter: shape is \[1\.0, 2\.0\]; expected a list of whole numbers",
    ),
    "a size that is no list": (
        lambda: layers.create_global_var(1, 2.0, "float32"),
        rf"{HERE}: create_global_var: shape is 1; expected a list of whole numbers",
    ),
    "a state of complex numbers": (
        lambda: layers.create_global_var([1], 2.0, np.complex128),
        rf"{HERE}: create_global_var: dtype is .*complex128.*; expected real or whole numbers, or bool",
    ),
    "first values that are an array": (
        lambda: layers.create_parameter([6], "float32", default_initializer=np.arange(6)),
        rf"{HERE}: create_parameter: default_initializer is array.*; expected one of fluid\.initializer",
    ),
    "groups that do not divide the channels": (
        lambda: layers.conv2d(layers.data("image", [3, 8, 8]), 4, 3, groups=2),
        rf"{HERE}: conv2d_0: 3 channels do not divide into 2 groups",
    ),
    "an image without channels": (
        lambda: layers.conv2d(layers.data("image", [8, 8]), 4, 3),
        rf"{HERE}: conv2d_0: input Variable\('image', \[s0, 8, 8\], float32\) must have four dimensions",
    ),
    "a dtype that numpy does not have": (
        lambda: layers.data("x", [3], dtype="float31"),
        rf"{HERE}: 'float31' is no dtype; expected a name such as 'float32'",
    ),
    "one parameter for two widths": (
        lambda: [layers.fc(layers.data(n, [s]), 5, param_attr="w") for n, s in (("a", 4), ("b", 6))],
        rf"parameter 'w' is asked for with shape \[6, 5\] .* exists with shape \[4, 5\] .*\(created at {HERE}\)",
    ),
    "an activation with a slip": (
        lambda: layers.fc(x13(), 1, act="rellu"),
        rf"{HERE}: activation 'rellu' is unknown; expected one of relu, ",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_LAYERS)
def test_a_wrong_layer_is_refused_where_it_is_written(mistake: str) -> None:
    call, expected = WRONG_LAYERS[mistake]
    text = message(ProgramError, call)
    assert re.search(expected, text), text


REFUSED_BY_TORCH: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a product of other widths": (
        lambda: layers.fc(layers.data("x", [3]), 5) @ layers.fc(layers.data("y", [7]), 3),
        r"Tensor\.__matmul__ cannot be recorded: .*\(-1x5 and -1x3\)",
        r"'addmm_0\.tmp_0' float32\[-1, 5\], 'addmm_1\.tmp_0' float32\[-1, 3\]",
    ),
    "a sum of other widths": (
        lambda: x13() + layers.data("y", [12]),
        r"Tensor\.__add__ cannot be recorded: The size of tensor a \(13\)",
        r"'x' float32\[-1, 13\], 'y' float32\[-1, 12\]",
    ),
    "a convolution of other channels": (
        lambda: nn.Conv2d(3, 4, 3)(layers.data("image", [1, 8, 8])),
        r"module 'conv2d_0', Conv2d\(3, 4, kernel_size=\(3, 3\), stride=\(1, 1\)\), cannot be recorded: .* 3 channels",
        r"'image' float32\[-1, 1, 8, 8\]",
    ),
    "a kernel larger than the image": (
        lambda: layers.conv2d(layers.data("image", [3, 4, 4]), 4, 7),
        r"torch\.conv2d in 'conv2d_0' cannot be recorded: .*Kernel size",
        r"'image' float32\[-1, 3, 4, 4\], 'conv2d_0\.w_0' float32\[4, 3, 7, 7\], 'conv2d_0\.b_0' float32\[4\]",
    ),
    "a module in a module": (
        lambda: nn.Sequential(nn.Linear(13, 8), nn.Sequential(nn.ReLU(), nn.Linear(12, 3)))(x13()),
        r"module 'sequential_0\.1\.1', Linear\(in_features=12, out_features=3, bias=True\), cannot be recorded: ",
        r"'aten_relu_0\.tmp_0' float32\[-1, 8\]",
    ),
    "parts that do not fit together": (
        lambda: layers.concat([layers.data("x", [4, 5]), layers.data("y", [4, 6])], axis=1),
        r"torch\.cat in 'concat_0' cannot be recorded: Sizes of tensors must match",
        r"'x' float32\[-1, 4, 5\], 'y' float32\[-1, 4, 6\]",
    ),
    "more of the largest than there are": (
        lambda: layers.topk(x13(), 20),
        r"torch\.topk.* cannot be recorded: selected index k out of range",
        r"'x' float32\[-1, 13\]",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED_BY_TORCH)
def test_a_torch_error_shows_line_operands_shapes_no_traceback(mistake: str, caplog: pytest.LogCaptureFixture) -> None:
    call, expected, operands = REFUSED_BY_TORCH[mistake]
    before = len(fluid.default_main_program().operators)
    with caplog.at_level(logging.WARNING):
        text = message(RecordError, call)
    assert re.search(rf"^{HERE}: {expected}", text), text
    assert re.search(rf"\n  its operands: {operands}$", text), text
    assert not re.search(r"\bs\d+\b", text)
    assert caplog.records == []
    assert issubclass(RecordError, RuntimeError)  # a script that catches torch's error still does
    assert len(fluid.default_main_program().operators) <= before + 4  # the failing call itself leaves nothing


def test_what_a_forward_raises_itself_goes_through() -> None:
    class Refuses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"no {tuple(x.shape)[1:]} here")

    with pytest.raises(ValueError, match=r"^no \(13,\) here$"):
        Refuses()(x13())


def trained() -> Any:
    """A classifier with a table, ready to run; returns its loss."""
    rows = layers.embedding(layers.data("ids", [1], dtype="int64"), [10, 4], param_attr="table")
    scores = layers.fc(rows, 3, act="softmax")
    loss = layers.mean(layers.cross_entropy(scores, layers.data("label", [1], dtype="int64")))
    fluid.optimizer.SGD(0.1).minimize(loss)
    fluid.Executor().run(fluid.default_startup_program())
    return loss


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers).reshape(-1, 1)


def by_executor(loss: Any, feed: Any, fetch: Any = ()) -> Any:
    return fluid.Executor().run(feed=feed, fetch_list=fetch)


def by_replicas(loss: Any, feed: Any, fetch: Any = ()) -> Any:
    executor = fluid.ParallelExecutor(False, loss.name)
    try:
        return executor.run(fetch, feed)
    finally:
        executor.close()


RUNS = [by_executor, by_replicas]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("check", [False, True])
def test_an_id_outside_its_table_is_named_with_table_and_line(
    run: Callable[..., Any], check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CHECK_NAN", str(int(check)))
    loss = trained()
    feed = {"ids": column(1, 2, 3, 12), "label": column(0, 1, 2, 0)}
    text = message(OperatorError, lambda: run(loss, feed))
    assert re.search(rf"operator 'embedding_0' \(aten\.embedding\.default\), recorded at {HERE}, failed", text), text
    assert "(id 12 at " in text
    assert "'table' has rows 0 to 9)" in text
    assert "table float32[10, 4]" in text


@pytest.mark.parametrize("run", RUNS)
def test_a_label_outside_the_classes_is_named(run: Callable[..., Any]) -> None:
    loss = trained()
    text = message(OperatorError, lambda: run(loss, {"ids": column(1, 2), "label": column(0, 7)}))
    assert "(id 7 at " in text
    assert "of 'label': 'fc_softmax_0.tmp_0' has elements along dimension 1 0 to 2)" in text


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("feed", "expected"),
    [
        ({"ids": column(1), "labels": column(1)}, r"'labels' is not in the program\. Did you mean 'label'"),
        ({"ids": column(1)}, rf"input 'label' \(declared at {HERE}\) is not fed; feed it as int64\[-1, 1\]"),
        (
            {"ids": column(1), "label": column(1).astype("float32")},
            r"'label' is float32\[1, 1\], but .* int64\[-1, 1\]",
        ),
        (
            {"ids": column(1, 2), "label": column(1)},
            "feeds 'ids' and 'label' must have the same number of rows.* 2 and 1",
        ),
        (
            {"ids": np.array([[1, 2]]), "label": column(1)},
            r"'ids' has shape \[1, 2\], but the program expects int64\[-1, 1\]",
        ),
        (
            column(1),
            "feed is a ndarray; expected a dict from the names of inputs to arrays, e.g. {'ids': …, 'label': …}",
        ),
        (
            {"ids": column(1), "label": column(1), "table": np.zeros((10, 5), "float32")},
            r"'table' has shape \[10, 5\], but the program expects float32\[10, 4\]",
        ),
        (
            {"ids": column(1), "label": column(1), "fc_softmax_0.tmp_0": np.zeros((1, 3), "float32")},
            rf"operator 'fc_softmax_0' \({HERE}\) makes it, so it cannot be fed",
        ),
    ],
)
def test_a_wrong_feed_is_named_with_what_is_expected(feed: Any, expected: str, run: Callable[..., Any]) -> None:
    loss = trained()
    text = message(FeedError, lambda: run(loss, feed))
    assert re.search(expected, text), text


@pytest.mark.parametrize("run", RUNS)
def test_a_fetch_that_is_no_list_is_taken_as_one(run: Callable[..., Any]) -> None:
    loss = trained()
    feed = {"ids": column(1, 2), "label": column(0, 1)}
    for fetch in (loss, loss.name):
        (alone,), (listed,) = run(loss, feed, fetch), run(loss, feed, [fetch])
        assert alone.shape == listed.shape
    assert "'tab' is not in the program. Did you mean 'table'" in message(FetchError, lambda: run(loss, feed, "tab"))


def test_unmergeable_fetches_are_named_with_shapes_by_replica() -> None:
    x = x13()
    products = torch.relu(x) @ x.t()
    compiled = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel()

    def run(merged: bool) -> Any:
        feed = {"x": np.ones((5, 13), "float32")}
        return fluid.Executor().run(compiled, feed, [products], return_merged=merged)

    text = message(FetchError, lambda: run(True))
    assert text.startswith(f"fetch {products.name!r}: replicas made shapes [[2, 2], [3, 3]], which cannot be merged")
    assert "return_merged=False" in text
    assert [part.shape for part in run(False)[0]] == [(2, 2), (3, 3)]


def test_a_gradient_is_not_fetched_from_a_program_for_test() -> None:
    trained()
    clone = fluid.default_main_program().clone(for_test=True)
    feed = {"ids": column(1), "label": column(1)}
    text = message(FetchError, lambda: fluid.Executor().run(clone, feed, ["table@GRAD"]))
    assert text.startswith("fetch 'table@GRAD': variable 'table@GRAD' is not in the program. Did you mean 'table'")


def test_the_startup_program_is_asked_for() -> None:
    loss = layers.mean(layers.fc(x13(), 1))
    text = message(ProgramError, lambda: by_executor(loss, {"x": np.zeros((2, 13), "float32")}))
    assert re.search(
        rf"variable 'fc_0\.\w_0' \(created at {HERE}\) has no value yet\. Run the startup program first", text
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda loss: fluid.ParallelExecutor(False, loss), r"is the variable 'mean_0\.tmp_0' itself; pass its name"),
        (lambda loss: fluid.ParallelExecutor(False, 3), "loss_name is 3; expected the name of the loss"),
        (
            lambda loss: fluid.ParallelExecutor(False, loss.name, "main"),
            "the program is a str; expected a fluid.Program",
        ),
        (
            lambda loss: fluid.ParallelExecutor(False, loss.name, exec_strategy=fluid.BuildStrategy()),
            "exec_strategy is a BuildStrategy; expected a fluid.ExecutionStrategy",
        ),
        (
            lambda loss: fluid.ParallelExecutor(False, loss.name, build_strategy=fluid.ExecutionStrategy()),
            "build_strategy is a ExecutionStrategy; expected a fluid.BuildStrategy",
        ),
        (lambda loss: fluid.Executor().run("main"), "given a str as its program; expected a fluid.Program or"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(call: Callable[[Any], Any], expected: str) -> None:
    loss = trained()
    assert re.search(expected, message(SpecError, lambda: call(loss)))
