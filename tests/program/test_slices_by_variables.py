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


def test_bounds_from_before_and_after_a_write_are_refused() -> None:
    layers, main = fluid.layers, fluid.Program()
    refused = pytest.raises(ProgramError, match="only a run knows how many")
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [6], dtype="float64")
        count = layers.create_global_var([1], 0, "int64", persistable=True)
        before = count + 0
        layers.increment(count, 2)
        after = count + 2
        with refused:
            x[:, before:count]
        assert x[:, count:after].shape[1] == 2
        step, steps = layers.fill_constant([1], "int64", 0), layers.fill_constant([1], "int64", 4)
        ahead = step + 2
        more = layers.less_than(step, steps)
        with layers.While(more).block():
            with refused:
                x[:, step:ahead]  # of the first iteration alone
            old = step + 0
            layers.increment(step, 2)
            with refused:
                x[:, old:step]
            assert x[:, step : step + 2].shape[1] == 2
            layers.less_than(step, steps, cond=more)


def test_a_slice_from_a_variable_to_itself_is_empty() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [STEPS], dtype="float64")
        at = layers.data("at", [1], dtype="int64", append_batch_size=False)
        none = x[:, at + 1 : at + 1]
        with pytest.raises(ProgramError, match="only a run knows how many"):
            x[:, at + 2 : at]
    assert run(main, {"x": values(2, STEPS), "at": np.array([1])}, [none])[0].shape == (2, 0)


def test_constants_from_before_a_branch_are_sizes_in_it() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = layers.data("x", [6], dtype="float64")
        zero, two = layers.fill_constant([1], "int32", 0), layers.fill_constant([1], "int32", 2)
        some = layers.reduce_sum(x) > layers.fill_constant([1], "float64", 0.0)
        part = layers.cond(some, lambda: layers.slice(x, [1], [zero], [two]), lambda: x[:, 0:2] * 2)
        shaped = layers.cond(some, lambda: layers.reshape(x, [-1, two, 3]), lambda: layers.reshape(x, [-1, 2, 3]))
    found = run(main, {"x": np.ones((3, 6))}, [part, shaped])
    assert [v.shape for v in found] == [(3, 2), (3, 2, 3)]


@pytest.mark.parametrize("writes", [False, True])
def test_constants_from_before_a_recurrence_are_sizes_in_it(writes: bool) -> None:
    layers, main = fluid.layers, fluid.Program()

    def recur() -> Any:
        x = layers.data("x", [4, 2, 6], append_batch_size=False, dtype="float64")
        zero, three = layers.fill_constant([1], "int32", 0), layers.fill_constant([1], "int32", 3)
        rnn = layers.StaticRNN()
        with rnn.step():
            step = rnn.step_input(x)
            memory = rnn.memory(shape=[-1, 3], batch_ref=step)
            added = memory + layers.slice(step, [1], [zero], [three]) + layers.expand(step[:, 0:1], [1, three])
            if writes:
                layers.increment(zero, 1)
            rnn.update_memory(memory, added)
            rnn.step_output(added)
        return rnn()

    with fluid.program_guard(main, fluid.Program()):
        if writes:
            with pytest.raises(ProgramError, match="whose value from before it is a size"):
                recur()
            return
        out = recur()
    fed = values(4, 2, 6)
    found = run(main, {"x": fed}, [out])[0]
    np.testing.assert_allclose(found[-1], (fed[..., :3] + fed[..., :1]).sum(0), rtol=1e-12)
