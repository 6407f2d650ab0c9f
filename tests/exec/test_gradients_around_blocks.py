"""Gradients of what is computed before, within and after blocks that write: against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

L = fluid.layers
ROWS = np.linspace(-1.0, 1.0, 6).reshape(2, 3)


def weight() -> Any:
    init = fluid.initializer.Normal(0.0, 0.5, seed=1)
    return L.create_parameter([3, 3], "float64", name="w", default_initializer=init)


def number(value: float, dtype: str = "float64") -> Any:
    return L.fill_constant([1], dtype, value)


def repeated(body: Callable[[], Any], times: int = 2) -> None:
    i, n = L.zeros([1], "int64"), number(times, "int64")
    going = L.less_than(i, n)
    with L.While(going).block():
        body()
        L.increment(i)
        L.less_than(i, n, cond=going)


def found(build: Callable[[Any, Any], Any]) -> tuple[np.ndarray, float, np.ndarray]:
    """The weight, the loss that `build` makes of rows and weight, and the weight's gradient."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        loss = build(L.data("x", [3], dtype="float64"), weight())
        ((_, grad),) = fluid.append_backward(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    value, gradient = exe.run(main, {"x": ROWS}, [loss, grad], scope=scope)
    return np.array(scope.find_var("w")), float(value[0]), gradient


def expect_same(build: Callable[[Any, Any], Any], oracle: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    drawn, loss, grad = found(build)
    w = torch.tensor(drawn, requires_grad=True)
    wanted = oracle(torch.tensor(ROWS), w)
    (gradient,) = torch.autograd.grad(wanted, [w])
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    np.testing.assert_allclose(grad, gradient.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("act", ["tanh", "sigmoid", "relu", "softmax"])
def test_a_loop_may_write_what_its_maker_saved(act: str) -> None:
    def build(x: Any, w: Any) -> Any:
        h = getattr(L, act)(L.matmul(x, w))
        repeated(lambda: L.assign(h * h + x, h))
        return L.mean(h * h)

    def oracle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.softmax(x @ w, -1) if act == "softmax" else getattr(torch, act)(x @ w)
        for _ in range(2):
            h = h * h + x
        return (h * h).mean()

    expect_same(build, oracle)


def test_two_loops_write_one_variable() -> None:
    def build(x: Any, w: Any) -> Any:
        h = L.matmul(x, w)
        before = L.matmul(h, w)
        repeated(lambda: L.assign(L.tanh(h), h))
        repeated(lambda: L.assign(L.matmul(h, w), h), 3)
        return L.mean(h) + L.mean(before)

    def oracle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        before = h @ w
        h = torch.tanh(torch.tanh(h))
        for _ in range(3):
            h = h @ w
        return h.mean() + before.mean()

    expect_same(build, oracle)


def test_a_block_within_a_block_writes() -> None:
    def build(x: Any, w: Any) -> Any:
        h = L.tanh(L.matmul(x, w))

        def outer() -> None:
            inner = L.tanh(h)
            repeated(lambda: L.assign(inner * 2.0, inner))
            L.assign(inner, h)

        repeated(outer)
        return L.mean(h)

    def oracle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(torch.tanh(torch.tanh(x @ w)) * 4.0) * 4.0).mean()

    expect_same(build, oracle)


def test_views_made_before_a_loop_keep_their_values() -> None:
    def build(x: Any, w: Any) -> Any:
        h = L.tanh(L.matmul(x, w))
        flat, part = L.reshape(h, [-1]), L.slice(h, [1], [0], [2])
        repeated(lambda: L.assign(h * 2.0, h))
        return L.mean(h * h) + L.mean(flat) + L.mean(part)

    def oracle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        return ((4.0 * h) ** 2).mean() + h.mean() + h[:, :2].mean()

    expect_same(build, oracle)


def test_assign_and_increment_leave_earlier_views_alone() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        h, i = L.fill_constant([1, 3], "float64", 1.0), L.zeros([1], "int64")
        views = [L.reshape(h, [-1]), L.unsqueeze(i, [0])]
        L.assign(h * 2.0, h)
        L.increment(i)
        fetches = [*views, h, i]
    values = fluid.Executor(fluid.CPUPlace()).run(main, {}, fetches)
    assert [v.ravel().tolist() for v in values] == [[1.0] * 3, [0], [2.0] * 3, [1]]


def test_a_write_in_place_of_a_saved_value_is_named() -> None:
    def build(x: Any, w: Any) -> Any:
        h = L.tanh(L.matmul(x, w))
        h.mul_(2.0)
        return L.mean(h)

    with pytest.raises(ProgramError, match=r"blocks\.py:\d+: .* value of output 0 of Tanh, which was written in place"):
        found(build)


# ---------------------------------------------------------------- second derivatives


def branched(x: Any, w: Any) -> Any:
    return L.cond(L.less_than(number(0.0), number(1.0)), lambda: L.tanh(L.matmul(x, w)), lambda: L.matmul(x, w))


def pooled(x: Any, w: Any) -> Any:
    return L.tanh(L.matmul(L.sequence_pool(x, "sum"), w))


def recurrent(x: Any, w: Any) -> Any:
    return L.dynamic_lstm(L.matmul(x, L.concat([w, w, w, w], 1)), 12, dtype="float64")[0]


def tagged(x: Any, w: Any) -> Any:
    return L.linear_chain_crf(L.matmul(x, w), L.data("tag", [1], dtype="int64", lod_level=1))


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (branched, "control_backward"),
        (pooled, "sequence_pool_backward"),
        (recurrent, "lstm_sequence_backward"),
        (tagged, "linear_chain_crf_backward"),
    ],
)
def test_a_lost_second_derivative_is_refused(make: Callable[[Any, Any], Any], operator: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = L.data("x", [3], dtype="float64", lod_level=0 if make is branched else 1)
        x.stop_gradient = False
        result = make(x, weight())
        (first,) = fluid.gradients([result], [x])
        penalty = L.mean(first * first) + L.mean(result)
        with pytest.raises(ProgramError, match=f"penstock.{operator} has no derivative"):
            fluid.append_backward(penalty)
        with pytest.raises(ProgramError, match=f"penstock.{operator} has no derivative"):
            fluid.gradients([L.mean(first * first)], [x])


def test_a_first_gradient_that_is_cut_off_may_be_used() -> None:
    def build(x: Any, w: Any) -> Any:
        x.stop_gradient = False
        result = branched(x, w)
        (first,) = fluid.gradients([result], [x])
        return L.mean(result * first.detach())

    def oracle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(True)
        result = torch.tanh(x @ w)
        (first,) = torch.autograd.grad(result.sum(), [x], retain_graph=True)
        return (result * first).mean()

    expect_same(build, oracle)
