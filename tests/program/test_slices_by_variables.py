"""Slices whose bounds are variables, against torch's: `x[:, i:j]` and `layers.slice`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError

STEPS, WIDTH = 5, 3


def run(main: fluid.Program, feed: dict[str, Any], fetches: list[Any]) -> list[np.ndarray]:
    return list(fluid.Executor(fluid.CPUPlace()).run(main, feed, fetches))


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape)


def test_bounds_that_follow_from_sizes() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, -1, WIDTH], "float64")
        x.stop_gradient = False
        first, shape = layers.zeros([1], "int32"), layers.shape(x)
        before, after = x[:, first : shape[1] - 1, :], x[..., first + 1 : shape[1], :]
        same = layers.slice(x, [1, 2], [first + 1, 1], [shape[1], 3])
        loss = layers.reduce_sum(before * after * after)
        (gradient,) = fluid.gradients(loss, x)
    for batch, steps in ((2, 5), (3, 2)):
        fed = values(batch, steps, WIDTH)
        wanted = torch.tensor(fed, requires_grad=True)
        (wanted[:, :-1] * wanted[:, 1:] ** 2).sum().backward()  # type: ignore[no-untyped-call]  # torch
        found = run(main, {"x": fed}, [before, after, same, gradient])
        np.testing.assert_array_equal(found[0], fed[:, :-1])
        np.testing.assert_array_equal(found[1], fed[:, 1:])
        np.testing.assert_array_equal(found[2], fed[:, 1:, 1:3])
        assert wanted.grad is not None
        np.testing.assert_allclose(found[3], wanted.grad.numpy(), rtol=1e-12)


def test_bounds_of_data_that_are_a_constant_apart() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [STEPS, WIDTH], dtype="float64", stop_gradient=False)
        at = layers.data("at", [1], dtype="int64", append_batch_size=False)
        window = x[:, at - 1 : layers.cast(at, "int32") + 1]
        also = layers.slice(x, [1], [at], [at + 1])
        (gradient,) = fluid.gradients(layers.reduce_sum(window * window * window), x)
    fed = values(2, STEPS, WIDTH)
    for position in (1, 3):
        wanted = torch.tensor(fed, requires_grad=True)
        (wanted[:, position - 1 : position + 1] ** 3).sum().backward()  # type: ignore[no-untyped-call]  # torch
        found = run(main, {"x": fed, "at": np.array([position])}, [window, also, gradient])
        np.testing.assert_array_equal(found[0], fed[:, position - 1 : position + 1])
        np.testing.assert_array_equal(found[1], fed[:, position : position + 1])
        assert wanted.grad is not None
        np.testing.assert_allclose(found[2], wanted.grad.numpy(), rtol=1e-12)
    with pytest.raises(OperatorError, match="index"):
        run(main, {"x": fed, "at": np.array([STEPS])}, [window])


def test_the_counter_of_a_loop_moves_its_slices() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [STEPS, WIDTH], dtype="float64")
        total = layers.fill_constant_batch_size_like(x, [-1, 1, WIDTH], "float64", 0.0)
        step, steps = layers.fill_constant([1], "int64", 0), layers.fill_constant([1], "int64", STEPS - 1)
        more = layers.less_than(step, steps)
        loop = layers.While(more)
        with loop.block():
            pair = layers.slice(x, [1], [step], [step + 1]) * x[:, step + 1 : step + 2]
            layers.assign(total + pair, output=total)
            layers.increment(step, 1, in_place=True)
            layers.less_than(step, steps, cond=more)
    fed = values(2, STEPS, WIDTH)
    found = run(main, {"x": fed}, [total])[0]
    np.testing.assert_allclose(found, (fed[:, :-1] * fed[:, 1:]).sum(1, keepdims=True), rtol=1e-12)


def test_bounds_that_only_a_run_knows_are_refused() -> None:
    layers = fluid.layers
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = layers.data("x", [STEPS, WIDTH])
        at = layers.data("at", [1], dtype="int64", append_batch_size=False)
        pair = layers.data("pair", [2], dtype="int64", append_batch_size=False)
        with pytest.raises(ProgramError, match="only a run knows how many"):
            x[:, at:]
        with pytest.raises(ProgramError, match="only a run knows how many"):
            x[:, 0:at]
        with pytest.raises(ProgramError, match="expected an integer with one element"):
            x[:, pair : pair + 1]
        with pytest.raises(ProgramError, match="expected an integer with one element"):
            x[:, layers.cast(at, "float32") :]
