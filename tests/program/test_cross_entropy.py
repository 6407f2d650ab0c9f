"""`cross_entropy` where probabilities are 0, infinite, or of a softmax that underflows: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.scope import Scope

L: Any = fluid.layers
LARGEST = {"float16": 65504.0, "float32": 1e20, "float64": 1e20}


def labelled(x: Any, label: int, num_classes: int, dtype: str, *, soft: bool) -> Any:
    """The same label for each row of x."""
    whole = L.cast(L.fill_constant_batch_size_like(x, [-1, 1], "int64", label), "int64")
    return L.cast(L.one_hot(whole, num_classes), dtype) if soft else whole


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", LARGEST)
def test_cross_entropy_of_infinite_logarithms_is_finite(soft: bool, dtype: str) -> None:
    least = 2.0**-14 if dtype == "float16" else 1e-30
    main, p = fluid.Program(), np.array([[0.0, 0.5], [np.inf, 0.5], [least, 0.5]], dtype)
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 2], dtype)
        x.stop_gradient = False
        loss = L.cross_entropy(x, labelled(x, 0, 2, dtype, soft=soft), soft_label=soft)
        (slope,) = fluid.gradients(L.reduce_sum(L.cast(loss, "float64")), x)
    found = fluid.Executor().run(main, {"x": p}, [loss, slope], scope=Scope())
    most = LARGEST[dtype]
    exact = 1e-2 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(found[0].ravel(), np.array([most, -most, -np.log(least)]), rtol=exact)
    np.testing.assert_allclose(found[1], np.array([[0.0, 0.0], [0.0, 0.0], [-1 / least, 0.0]]), rtol=exact)


def of_softmax(x: Any) -> Any:
    return L.softmax(x)


def reshaped(x: Any) -> Any:
    return L.reshape(L.softmax(L.unsqueeze(x, [1])), [-1, 2])


def unsqueezed_twice(x: Any) -> Any:
    return L.squeeze(L.unsqueeze(L.unsqueeze(L.softmax(x), [1]), [1]), [1, 2])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("made", [of_softmax, reshaped, unsqueezed_twice])
def test_cross_entropy_of_a_softmax_follows_the_formula(soft: bool, dtype: str, made: Callable[[Any], Any]) -> None:
    logits = np.array([[70.0, 0.0], [800.0, 0.0], [0.0, 800.0], [3.0, 2.0]], dtype)
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 2], dtype)
        x.stop_gradient = False
        p = made(x)
        loss = L.cross_entropy(p, labelled(x, 1, 2, dtype, soft=soft), soft_label=soft)
        (slope,) = fluid.gradients(L.reduce_sum(loss), x)
    found, gradient, shares = fluid.Executor().run(main, {"x": logits}, [loss, slope, p], scope=Scope())
    softmax = torch.softmax(torch.from_numpy(logits).double(), -1).numpy()
    np.testing.assert_allclose(found.ravel(), [64.0, 64.0, 0.0, -np.log(softmax[3, 1])], rtol=1e-6)
    np.testing.assert_allclose(gradient, softmax - np.array([0.0, 1.0]), rtol=1e-5, atol=1e-15)
    np.testing.assert_allclose(shares, softmax, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_of_logits_of_minus_infinity_is_a_number(soft: bool) -> None:
    main, logits = fluid.Program(), np.array([[0.0, -np.inf], [-np.inf, 0.0]], "float32")
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 2])
        loss = L.cross_entropy(L.softmax(x), labelled(x, 1, 2, "float32", soft=soft), soft_label=soft)
    (found,) = fluid.Executor().run(main, {"x": logits}, [loss], scope=Scope())
    np.testing.assert_allclose(found.ravel(), [64.0, 0.0])


@pytest.mark.parametrize("detached", [False, True])
def test_a_branch_has_the_gradient_of_the_formula(detached: bool) -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        logits = L.create_parameter([1, 2], "float32", name="logits")
        label, zero = L.fill_constant([1, 1], "int64", 1), L.fill_constant([1], "float32", 0.0)

        def costs() -> Any:
            p = L.softmax(logits * 1.0)
            return L.cross_entropy(p.detach() if detached else p, label)

        loss = L.cond(zero < 1.0, costs, lambda: L.cross_entropy(logits, label))
        total = L.reduce_sum(loss) + L.reduce_sum(logits)
        ((_, slope),) = fluid.backward.append_backward(total)
    exe.run(startup, scope=scope)
    parameter = scope.find("logits")
    assert parameter is not None
    parameter.copy_(torch.tensor([[800.0, 0.0]]))
    value, gradient = exe.run(main, {}, [loss, slope], scope=scope)
    np.testing.assert_allclose(value.ravel(), [64.0])
    np.testing.assert_allclose(gradient, [[1.0, 1.0]] if detached else [[2.0, 0.0]])


def test_a_loop_reads_probabilities_from_before_it() -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        logits = L.create_global_var([1, 2], 0.0, "float32", persistable=True, name="logits")
        p, label = L.softmax(logits), L.fill_constant([1, 1], "int64", 1)
        step, steps = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", 2)
        total, more = L.fill_constant([1, 1], "float32", 0.0), L.less_than(step, steps)
        with L.While(more).block():
            L.assign(total + L.cross_entropy(p, label), total)
            L.assign(np.array([[9.0, -9.0]], "float32"), logits)
            L.increment(step)
            L.less_than(step, steps, cond=more)
    exe.run(startup, scope=scope)
    (found,) = exe.run(main, {}, [total], scope=scope)
    np.testing.assert_allclose(found.ravel(), [2 * np.log(2)], rtol=1e-6)


def test_no_gradient_passes_probabilities_that_stop_it() -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [-1, 2])
        x.stop_gradient = False
        stopped = L.softmax(x)
        stopped.stop_gradient = True
        label = labelled(x, 1, 2, "float32", soft=False)
        loss = L.cross_entropy(stopped, label) + L.reduce_sum(x, 1, keep_dim=True)
        detached = L.cross_entropy(L.softmax(x).detach(), label) + L.reduce_sum(x, 1, keep_dim=True)
        slopes = [fluid.gradients(L.reduce_sum(one), x)[0] for one in (loss, detached)]
    exe.run(startup, scope=scope)
    for found in exe.run(main, {"x": np.array([[1.0, 2.0]], "float32")}, slopes, scope=scope):
        np.testing.assert_array_equal(found, [[1.0, 1.0]])


def test_probabilities_of_logits_that_change_later_are_read() -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        kept = L.create_global_var([1, 2], 0.0, "float32", persistable=True, name="kept")
        p = L.softmax(kept)
        L.assign(np.array([[9.0, -9.0]], "float32"), kept)
        loss = L.cross_entropy(p, L.fill_constant([1, 1], "int64", 1))
    exe.run(startup, scope=scope)
    (found,) = exe.run(main, {}, [loss], scope=scope)
    np.testing.assert_allclose(found.ravel(), [np.log(2)], rtol=1e-6)
