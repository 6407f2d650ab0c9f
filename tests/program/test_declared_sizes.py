"""Sizes that a script declares as numbers for layers.data and feeds as others, as Fluid lets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, RecordError

layers = fluid.layers


@pytest.fixture(autouse=True)
def program() -> Iterator[fluid.Program]:
    """A main program of its own for each test, under whose guard it runs."""
    main = fluid.Program(seed=1)
    with fluid.program_guard(main, fluid.Program(seed=1)), fluid.scope_guard(fluid.Scope()):
        yield main


def run(feed: dict[str, Any], fetches: list[Any], replicas: int = 0) -> list[np.ndarray]:
    main: Any = fluid.default_main_program()
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    if replicas:
        places = fluid.cpu_places(replicas)
        main = fluid.CompiledProgram(main).with_data_parallel(loss_name=fetches[0].name, places=places)
    return list(executor.run(main, feed, fetches))


def attention(steps: int = 51, batch: int = 2) -> tuple[Any, Any]:
    """Self-attention over words declared as rows of all samples, with a bias declared by its steps."""
    words = layers.data("words", [batch * steps, 1], dtype="int64", append_batch_size=False)
    bias = layers.data("bias", [batch, steps, steps], append_batch_size=False)
    rows = layers.reshape(layers.embedding(words, [20, 8], param_attr="table"), [batch, -1, 8])
    query = layers.fc(rows, 8, num_flatten_dims=2, param_attr="query", bias_attr=False)
    seen = layers.matmul(layers.softmax(layers.matmul(query, rows, transpose_y=True) + bias), rows)
    return layers.mean(layers.square(seen)), seen


def in_torch(words: np.ndarray, bias: np.ndarray, table: np.ndarray, query: np.ndarray) -> list[torch.Tensor]:
    own = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (table, query)]
    rows = own[0][torch.from_numpy(words[:, 0])].reshape(bias.shape[0], -1, 8)
    weights = torch.softmax(rows @ own[1] @ rows.transpose(1, 2) + torch.from_numpy(bias).double(), -1)
    loss = (weights @ rows).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, own)]


@pytest.mark.parametrize("steps", [51, 13, 2])
def test_rows_of_words_are_fed_with_other_sizes(steps: int) -> None:
    loss, _ = attention()
    fluid.append_backward(loss)
    draw = np.random.default_rng(steps)
    words = draw.integers(0, 20, (2 * steps, 1))
    bias = draw.normal(size=(2, steps, steps)).astype("float32")
    found = run({"words": words, "bias": bias}, [loss, "table@GRAD", "query@GRAD", "table", "query"])
    for value, wanted in zip(found, in_torch(words, bias, *found[3:]), strict=False):
        np.testing.assert_allclose(value.reshape(wanted.shape), wanted, atol=2e-6)


def test_sizes_that_depend_on_one_another_are_checked() -> None:
    loss, _ = attention()
    feed = {"words": np.zeros((26, 1), "int64"), "bias": np.zeros((2, 12, 12), "float32")}
    with pytest.raises(FeedError, match=r"feed 'bias' has size 12 in dimension 1; expected 13"):
        run(feed, [loss])
    feed = {"words": np.zeros((26, 1), "int64"), "bias": np.zeros((3, 13, 13), "float32")}
    with pytest.raises(FeedError, match=r"feed 'bias' has shape \[3, 13, 13\].*float32\[2, -1, -1\]"):
        run(feed, [loss])  # the script itself reshapes to a batch of 2


def test_sizes_of_a_matmul_are_taken_for_one_another() -> None:
    items = layers.data("items", [20, 50, 1], dtype="int64", append_batch_size=False)
    adjacent = layers.data("adjacent", [20, 50, 50], append_batch_size=False)
    mask = layers.data("mask", [20, -1, 1], append_batch_size=False)
    rows = layers.reshape(layers.embedding(items, [20, 3]), [20, -1, 3])
    seen = layers.matmul(adjacent, rows) * mask
    for nodes in (50, 9):
        values = np.random.default_rng(nodes).normal(size=(20, nodes, nodes)).astype("float32")
        feed = {
            "items": np.ones((20, nodes, 1), "int64"),
            "adjacent": values,
            "mask": np.ones((20, nodes, 1), "float32"),
        }
        got, found = run(feed, [seen, rows])
        np.testing.assert_allclose(got, values @ found, atol=1e-4)
    with pytest.raises(FeedError, match="feed 'mask' has size 8 in dimension 1; expected 9"):
        run({**feed, "mask": np.ones((20, 8, 1), "float32")}, [seen])


def test_steps_of_a_batch_are_fed_with_other_sizes() -> None:
    ids = layers.data("ids", [40, 1], dtype="int64")
    mask = layers.data("mask", [40, 1])
    label = layers.data("label", [1])
    rows = layers.embedding(ids, [20, 4], param_attr="table")
    pooled = layers.reduce_sum(rows * mask, dim=1)
    loss = layers.mean(layers.square_error_cost(layers.fc(pooled, 1), label))
    fluid.optimizer.SGD(0.1).minimize(loss)
    for steps in (40, 7):
        values = np.random.default_rng(steps).integers(0, 20, (3, steps, 1))
        feed = {"ids": values, "mask": np.ones((3, steps, 1), "float32"), "label": np.ones((3, 1), "float32")}
        (got,) = run(feed, [pooled])
        assert got.shape == (3, 4)
    with pytest.raises(FeedError, match="'ids' and 'mask' must have the same size in dimension 1, but have 7 and 6"):
        run({**feed, "mask": np.ones((3, 6, 1), "float32")}, [pooled])


def test_a_size_that_a_parameter_has_is_fixed() -> None:
    x = layers.data("x", [6, 4], append_batch_size=False)
    out = layers.fc(x, 3)
    assert x.desc.shape[1] == 4
    assert run({"x": np.ones((9, 4), "float32")}, [out])[0].shape == (9, 3)
    with pytest.raises(FeedError, match=r"feed 'x' has shape \[9, 5\], but the program expects float32\[-1, 4\]"):
        run({"x": np.ones((9, 5), "float32")}, [out])


def test_a_line_that_asks_for_the_number_fixes_it() -> None:
    x = layers.data("x", [6, 4], append_batch_size=False)
    assert x.shape == (6, 4)
    assert [int(size) for size in x.shape] == [6, 4]
    assert list(x.desc.shape) == [6, 4]
    with pytest.raises(FeedError, match=r"the program expects float32\[6, 4\]"):
        run({"x": np.ones((7, 4), "float32")}, [x * 2.0])


def test_a_clone_follows_what_is_fixed_later(program: fluid.Program) -> None:
    x = layers.data("x", [6, 4], append_batch_size=False)
    doubled = x * 2.0
    clone = program.clone(for_test=True)
    layers.fc(x, 3)
    executor = fluid.Executor(fluid.CPUPlace())
    with pytest.raises(FeedError, match=r"float32\[-1, 4\]"):
        executor.run(clone, {"x": np.ones((7, 5), "float32")}, [doubled])
    assert executor.run(clone, {"x": np.ones((7, 4), "float32")}, [doubled])[0].shape == (7, 4)


def test_blocks_take_the_declared_numbers() -> None:
    x = layers.data("x", [6, 4], append_batch_size=False)
    out = layers.cond(layers.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x)
    assert list(x.desc.shape) == [6, 4]
    assert run({"x": np.ones((6, 4), "float32")}, [out])[0].sum() == 48.0


def test_what_does_not_fit_as_declared_says_the_numbers(program: fluid.Program) -> None:
    x, y = (layers.data(name, [6, size], append_batch_size=False) for name, size in (("x", 4), ("y", 5)))
    with pytest.raises(RecordError, match=r"'x' float32\[6, 4\], 'y' float32\[6, 5\]"):
        x + y
    assert program.operators == []
    assert len(program.symbols) == 4


def test_rows_without_a_batch_are_shared_by_replicas() -> None:
    x = layers.data("x", [6, 4], append_batch_size=False)
    y = layers.data("y", [6, 1], append_batch_size=False)
    loss = layers.mean(layers.square_error_cost(layers.fc(x, 1, param_attr="w"), y))
    fluid.append_backward(loss)
    draw = np.random.default_rng(0)
    feed = {"x": draw.normal(size=(8, 4)).astype("float32"), "y": draw.normal(size=(8, 1)).astype("float32")}
    (one, together) = run(feed, [loss, "w@GRAD"])
    each, shared = run(feed, [loss, "w@GRAD"], replicas=2)
    assert each.shape == (2,)
    np.testing.assert_allclose(each.mean(), one, atol=1e-6)
    np.testing.assert_allclose(shared[:4], together, atol=1e-6)


def test_an_input_is_declared_twice_with_its_numbers() -> None:
    first = layers.data("x", [6, 4], append_batch_size=False)
    assert layers.data("x", [6, 4], append_batch_size=False) is first


def test_a_program_text_keeps_open_sizes(program: fluid.Program) -> None:
    attention()
    assert str(fluid.Program.parse(str(program))) == str(program)
    assert program.symbols == ["f0"]
