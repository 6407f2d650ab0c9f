"""What `while_loop` does to its variables: those that others see through them keep their values; sizes may change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock import layers as L
from penstock.errors import ProgramError


def test_while_loop_leaves_parameters_and_bases_of_views_alone() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = L.data("x", [2])
        start = L.create_parameter([2], "float32", name="start")
        row = L.reshape(L.scale(x, 1.0), [-1, 2])
        base = L.scale(x, 3.0)
        view = L.reshape(base, [-1, 1, 2])
        i = L.fill_constant([1], "int64", 0)
        _, learned, moved = L.while_loop(
            lambda i, a, b: L.less_than(i, L.fill_constant([1], "int64", 2)),
            lambda i, a, b: [i + 1, a * 2.0, b + 1.0],
            [i, start, view],
        )
        loss = L.mean(row * learned) + L.mean(moved)
        fluid.optimizer.SGD(0.0).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup)
    feed = {"x": np.ones((3, 2), "float32")}
    before, kept, last = exe.run(main, feed=feed, fetch_list=[start, base, moved])
    assert np.array_equal(kept, np.full((3, 2), 3.0, "float32"))
    assert np.array_equal(last.reshape(3, 2), np.full((3, 2), 5.0, "float32"))
    assert np.array_equal(exe.run(main, feed=feed, fetch_list=[start])[0], before)


def number(value: int) -> Any:
    return L.fill_constant([1], "int64", value)


def extended(concat: Any, x: Any, w: Any, dim: int) -> Any:
    """One more row, or column: the sum of the last and of `w`."""
    last = x[-1:] if dim == 0 else x[:, -1:]
    return concat([x, last + w], dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_variables_of_a_loop_may_grow(dim: int) -> None:
    main, startup, exe = fluid.Program(), fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, startup):
        x = L.data("x", [2], dtype="float64", stop_gradient=False)
        w = L.create_parameter([1], "float64", "w", default_initializer=fluid.initializer.Constant(0.5))
        steps, grown = L.while_loop(
            lambda i, x: L.less_than(i, number(4)), lambda i, x: [i + 1, extended(L.concat, x, w, dim)], [number(0), x]
        )
        loss = L.reduce_sum(grown * grown * grown)
        fluid.append_backward(loss)
    assert fluid.Program.parse(str(main)) == main
    exe.run(startup)
    value = np.random.default_rng(3).normal(size=(3, 2))
    found = exe.run(main, {"x": value}, [steps, grown, loss, "x@GRAD", "w@GRAD"])
    leaf, weight = torch.tensor(value, requires_grad=True), torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    rows = leaf
    for _ in range(4):
        rows = extended(torch.cat, rows, weight, dim)
    wanted = (rows**3).sum()
    wanted.backward()  # type: ignore[no-untyped-call]  # torch
    assert found[0].item() == 4
    for got, tensor in zip(found[1:], (rows, wanted.reshape(1), leaf.grad, weight.grad), strict=True):
        assert tensor is not None
        np.testing.assert_allclose(got, tensor.detach().numpy(), rtol=1e-12)


def test_a_loop_without_a_step_keeps_the_sizes_it_began_with() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x, n = fluid.data("x", [None, 2], "float64"), fluid.data("n", [1], "int64")
        _, (grown, nested) = L.while_loop(
            lambda i, pair: L.less_than(i, n),
            lambda i, pair: [i + 1, [L.concat(pair, 0), pair[0][:1] * 2.0]],
            [number(0), [x, x * 3.0]],
        )
    value = np.arange(4.0).reshape(2, 2)
    for steps in (0, 1, 3):
        rows, other = torch.tensor(value), torch.tensor(value) * 3.0
        for _ in range(steps):
            rows, other = torch.cat([rows, other]), rows[:1] * 2.0
        feed = {"x": value, "n": np.array([steps])}
        for got, wanted in zip(fluid.Executor().run(main, feed, [grown, nested]), (rows, other), strict=True):
            np.testing.assert_array_equal(got, wanted.numpy())


def test_dtypes_and_ranks_of_a_loop_do_not_change() -> None:
    for change in (lambda x: L.cast(x, "float32"), lambda x: L.unsqueeze(x, [1])):
        with (
            fluid.program_guard(fluid.Program(), fluid.Program()),
            pytest.raises(ProgramError, match="expected its dtype and number of dimensions"),
        ):
            L.while_loop(
                lambda i, x, change=change: L.less_than(i, number(2)),
                lambda i, x, change=change: [i + 1, change(x)],
                [number(0), L.data("x", [2], dtype="float64")],
            )


def test_the_body_of_a_growing_loop_reads_declared_sizes() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        y = layers.data("y", [4, 6], append_batch_size=False)
        grown, step = layers.fill_constant([1, 6], "float32", 0.0), layers.fill_constant([1], "int64", 0)
        end = layers.fill_constant([1], "int64", 3)
        _, made = layers.while_loop(
            lambda i, g: layers.less_than(i, end), lambda i, g: [i + 1, layers.concat([g, y[:1]], 0)], [step, grown]
        )
    fed = np.arange(24, dtype="float32").reshape(4, 6)
    found = fluid.Executor().run(main, {"y": fed}, [made])[0]
    np.testing.assert_array_equal(found, np.concatenate([np.zeros((1, 6)), *[fed[:1]] * 3]))
