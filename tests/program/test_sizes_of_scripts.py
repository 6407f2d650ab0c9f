"""Sizes as Fluid's scripts give them: elements of `shape`, and sizes that differ by name but not in a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, OperatorError, ProgramError
from penstock.program.layers.contrib import shuffle_batch

SHARE = 3


def run(main: fluid.Program, feed: dict[str, Any], fetches: list[Any]) -> list[np.ndarray]:
    return list(fluid.Executor(fluid.CPUPlace()).run(main, feed, fetches))


def test_elements_of_shape_are_sizes() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [4])
        rows, shape = layers.shape(x)[0], layers.shape(x)
        made = [
            layers.fill_constant([rows, 2], "float32", 1.5),
            layers.fill_constant(layers.shape(x), "int64", 7),
            layers.fill_constant([layers.cast(rows * 2 - 1, "int64")], "float32", 0.0),
            layers.reshape(x, [layers.slice(shape, [0], [0], [1]), 2, 2]),
            layers.expand(layers.fill_constant([1, 2], "float32", 1.0), [rows, 1]),
            layers.slice(x, [0], [1], [layers.concat([shape[:1], shape[1:]])[0]]),
        ]
    for batch in (3, 6):
        x_value = np.random.default_rng(batch).normal(size=(batch, 4)).astype("float32")
        found = run(main, {"x": x_value}, made)
        assert [list(v.shape) for v in found] == [
            [batch, 2], [batch, 4], [2 * batch - 1], [batch, 2, 2], [batch, 2], [batch - 1, 4]
        ]  # fmt: skip
        np.testing.assert_array_equal(found[3], x_value.reshape(batch, 2, 2))
        assert (found[0] == 1.5).all() and (found[1] == 7).all()


def test_a_size_that_a_feed_has_is_minus_one_for_the_script() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids = layers.data("ids", [1], dtype="int64", lod_level=1)
        x = fluid.data("x", [None, 6], "float32")
        steps = layers.data("steps", [4, 3])
        twice = layers.concat([x, x], 0)
        assert ids.shape == (-1, 1) and x.shape == (-1, 6) and twice.shape == (-1, 6)
        assert x.shape[0] == -1 and ids.shape[0] in (-1, 2) and (x.shape[0] != -1) is not True
        assert steps.shape != (-1, -1, 3) and x.shape != (-2, 6) and x.shape != (-1, 5)
        assert x.shape[0] - 1 != x.shape[0] and (x.shape[0] == 7) is not True
        parts = [torch.reshape(x, [x.shape[0], -1, 2]), layers.reshape(x, [x.shape[0], 3, -1]), x.view(-1, 3)]
    for batch in (2, 5):
        found = run(main, {"x": np.ones((batch, 6), "float32")}, parts)
        assert [v.shape for v in found] == [(batch, 3, 2), (batch, 3, 2), (2 * batch, 3)]


class Scaled(torch.nn.Module):
    """Takes -1 for "no length was given", as modules do."""

    def scale(self, x: Any, length: int = -1) -> Any:
        return x * 100 if length == -1 else x * 2

    def forward(self, x: Any) -> Any:
        return self.scale(x, x.shape[0])


def test_no_size_is_minus_one_in_a_module_and_a_captured_loss() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        made = Scaled()(fluid.layers.data("x", [6], dtype="float64"))
    np.testing.assert_array_equal(run(main, {"x": np.ones((3, 6))}, [made])[0], np.full((3, 6), 2.0))
    linear = torch.nn.Linear(2, 1, bias=False).double()

    def loss(outputs: Any, target: Any) -> Any:
        return Scaled().scale((outputs - target).mean(), outputs.shape[0]) * (3 if outputs.shape[0] == -1 else 1)

    examples = [torch.ones(4, 2).double(), torch.zeros(4, 1).double()]
    captured = fluid.capture(linear, loss, fluid.optimizer.SGD(0.0), examples, num_targets=1)
    wanted = 2 * float(linear.weight.detach().sum())
    assert float(captured.step(*examples)) == pytest.approx(wanted)
    captured.close()


def test_what_is_calculated_of_a_size_is_not_minus_one() -> None:
    layers = fluid.layers
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = layers.data("x", [6])
        assert x.shape[0] * 2 != -1 and x.shape[0] * 3 - 1 != -1
        assert layers.concat([x, x], 0).shape[0] == -1


def test_what_follows_from_data_is_no_size() -> None:
    layers = fluid.layers
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = layers.data("x", [4], dtype="int64")
        for size in (layers.reduce_sum(x), x[0, :1], layers.reduce_sum(layers.shape(x))):
            with pytest.raises(ProgramError, match="used as a size, which cannot follow from data"):
                layers.fill_constant([size, 1], "float32", 1.0)


class Shares:
    """Scores of three rows a sequence beside one of the batch, as models with negative samples have them."""

    def __init__(self) -> None:
        layers = fluid.layers
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            negative = layers.data("negative", [1], dtype="int64", lod_level=1)
            positive = layers.data("positive", [1], dtype="float64")
            table = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0, seed=2))
            scores = layers.embedding(negative, [9, 1], param_attr=table, dtype="float64")
            scores = layers.elementwise_mul(scores, layers.sequence_expand_as(positive, negative))
            worst = layers.reduce_max(layers.sequence_reshape(scores, SHARE), dim=1, keep_dim=True)
            self.margin = positive - worst
            fluid.append_backward(layers.reduce_sum(self.margin * self.margin))
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)

    def run(self, lengths: list[int], program: Any = None) -> list[np.ndarray]:
        ids = np.arange(sum(lengths))[:, None]
        feed = {"negative": fluid.create_lod_tensor(ids, [lengths]), "positive": np.ones((len(lengths), 1))}
        fetches = [self.margin] if program else [self.margin, "table@GRAD"]
        return list(self.exe.run(program or self.main, feed, fetches, scope=self.scope))


def test_a_share_of_ragged_rows_stands_beside_the_batch() -> None:
    model = Shares()
    table = torch.tensor(np.array(model.scope.find_var("table")), requires_grad=True)
    wanted = 1.0 - table.reshape(-1, SHARE).amax(1, keepdim=True)
    (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
    margin, gradient = model.run([SHARE] * 3)
    np.testing.assert_allclose(margin, wanted.detach().numpy(), rtol=1e-12)
    assert table.grad is not None
    np.testing.assert_allclose(gradient, table.grad.numpy(), rtol=1e-12, atol=1e-15)
    test = fluid.CompiledProgram(model.main.clone(for_test=True)).with_data_parallel(places=[fluid.CPUPlace()] * 2)
    np.testing.assert_allclose(model.run([SHARE] * 3, test)[0], margin, rtol=1e-12)


class Joined:
    """Histories with a target behind each, of two slots: their rows are sums of different inputs' rows."""

    def __init__(self) -> None:
        layers = fluid.layers
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            inputs = [layers.data(name, [1], dtype="int64", lod_level=1) for name in "abcd"]
            table = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0, seed=2))
            rows = [layers.embedding(one, [9, 2], param_attr=table, dtype="float64") for one in inputs]
            left, right = layers.sequence_concat(rows[:2]), layers.sequence_concat(rows[2:])
            both = layers.concat([left, right, left * right], axis=1)
            self.pooled = layers.sequence_pool(both, "sum")
            fluid.append_backward(layers.reduce_sum(self.pooled * self.pooled))
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)

    def run(self, *lengths: list[int]) -> list[np.ndarray]:
        self.ids = [np.arange(7 * number, 7 * number + sum(own))[:, None] % 9 for number, own in enumerate(lengths)]
        given = zip("abcd", self.ids, lengths, strict=True)
        feed = {name: fluid.create_lod_tensor(ids, [own]) for name, ids, own in given}
        return list(self.exe.run(self.main, feed, [self.pooled, "table@GRAD"], scope=self.scope))


def test_sums_of_ragged_rows_are_concatenated() -> None:
    model, lengths = Joined(), [2, 3]
    pooled, gradient = model.run(lengths, [1, 1], lengths, [1, 1])
    table = torch.tensor(np.array(model.scope.find_var("table")), requires_grad=True)
    samples, at = [], 0
    for number, length in enumerate(lengths):
        own = [np.append(model.ids[k][at : at + length], model.ids[k + 1][number]) for k in (0, 2)]
        left, right = (table[torch.tensor(ids)] for ids in own)
        samples.append(torch.cat([left, right, left * right], 1).sum(0))
        at += length
    wanted = torch.stack(samples)
    (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
    assert table.grad is not None
    np.testing.assert_allclose(pooled, wanted.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(gradient, table.grad.numpy(), rtol=1e-12, atol=1e-13)


def test_other_sums_of_ragged_rows_are_an_error_of_the_run() -> None:
    with pytest.raises(OperatorError, match="expect_rows: x has 6 rows; expected 7"):
        Joined().run([2, 3], [1, 1], [2, 2], [1, 1])


def test_another_share_of_rows_is_an_error_of_the_run() -> None:
    with pytest.raises(OperatorError, match="expect_rows: x has 2 rows; expected 3"):
        Shares().run([SHARE, 2, 1])


def test_steps_of_inputs_that_are_used_together_are_one_size() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        items = fluid.data("items", [None, -1], "int64")
        kinds = fluid.data("kinds", [None, -1], "int64")
        mask = fluid.data("mask", [None, -1, 1], "float32")
        rows = [layers.one_hot(layers.unsqueeze(ids, [2]), 4) for ids in (items, kinds)]
        both = layers.concat(rows, axis=2) + mask
    assert both.desc.shape == (*items.desc.shape, 8)
    ids = np.array([[0, 1, 2], [3, 2, 1]])
    feed = {"items": ids, "kinds": ids[:, ::-1].copy(), "mask": np.full((2, 3, 1), -1.0, "float32")}
    assert run(main, feed, [both])[0].argmax(2).tolist() == ids.tolist()
    with pytest.raises(FeedError, match="'items' and 'mask' must have the same size"):
        run(main, {**feed, "mask": np.zeros((2, 4, 1), "float32")}, [both])


def test_sums_without_dimensions_are_concatenated() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [2])
        both = layers.concat([layers.reduce_sum(x), layers.reduce_max(x)], axis=-1)
    assert run(main, {"x": np.array([[1, 2], [3, 4]], "float32")}, [both])[0].tolist() == [10.0, 4.0]


def test_shuffled_rows_are_a_permutation_that_changes() -> None:
    layers, main = fluid.layers, fluid.Program()
    main.random_seed = 5
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [1], dtype="float64", stop_gradient=False)
        shuffled = shuffle_batch(x)
        (gradient,) = fluid.gradients(layers.reduce_sum(shuffled * shuffled * shuffled), x)
    rows, exe = np.arange(40.0)[:, None], fluid.Executor(fluid.CPUPlace())
    orders = []
    for _ in range(2):
        found, slope = exe.run(main, {"x": rows}, [shuffled, gradient])
        orders.append(found[:, 0].tolist())
        np.testing.assert_allclose(slope, 3 * rows**2)
    assert [sorted(order) for order in orders] == [rows[:, 0].tolist()] * 2
    assert orders[0] != orders[1] and orders[0] != rows[:, 0].tolist()


def test_the_batch_is_counted_beside_a_fixed_number_of_rows() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [3, 2, 4], dtype="float64", append_batch_size=False, stop_gradient=False)
        first = layers.data("first", [4], dtype="float64", stop_gradient=False)
        rnn = layers.StaticRNN()
        with rnn.step():
            before = rnn.memory(init=first)
            now = layers.tanh(rnn.step_input(x) + before)
            rnn.update_memory(before, now)
            rnn.output(now)
        states = rnn() * layers.relu(first)
        fluid.append_backward(layers.reduce_sum(states * states))
    values = [np.random.default_rng(5).normal(size=size) for size in ((3, 2, 4), (2, 4))]
    found = run(main, dict(zip(("x", "first"), values, strict=True)), [states, "x@GRAD", "first@GRAD"])
    steps, begin = (torch.tensor(value, requires_grad=True) for value in values)
    state, rows = begin, []
    for step in steps:
        state = torch.tanh(step + state)
        rows.append(state * torch.relu(begin))
    wanted = torch.stack(rows)
    (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
    for got, tensor in zip(found, (wanted, steps.grad, begin.grad), strict=True):
        assert tensor is not None
        np.testing.assert_allclose(got, tensor.detach().numpy(), rtol=1e-12, atol=1e-14)
    with pytest.raises(OperatorError, match="expect_rows: x has 5 rows; expected 2"):
        run(main, {"x": values[0], "first": np.ones((5, 4))}, [states])
