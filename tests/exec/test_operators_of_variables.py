"""Operators of Variables as in Fluid: where a batch is first they begin together, and `+=` makes another variable."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid

L = fluid.layers
X, MASK = np.arange(1.0, 25.0).reshape(2, 3, 4), np.arange(1.0, 7.0).reshape(2, 3)


def run(build: Callable[[Any, Any], Any]) -> np.ndarray:
    main, exe = fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        made = build(fluid.data("x", [None, 3, 4], "float64"), fluid.data("mask", [None, 3], "float64"))
    return np.asarray(exe.run(main, {"x": X, "mask": MASK}, [made])[0])


def of_unknown_size(x: Any) -> Any:
    """The same values, in a variable whose rows follow from data."""
    is_small = L.less_than(L.reduce_sum(x), L.fill_constant([1], "float64", 1e9))
    return L.cond(is_small, lambda: x * 1.0, lambda: L.concat([x, x], 0))


OPERATORS = ["add", "sub", "mul", "truediv", "gt", "iadd", "isub", "imul", "itruediv"]


@pytest.mark.parametrize("name", OPERATORS)
def test_operands_begin_together(name: str) -> None:
    call = getattr(operator, name)
    found = run(lambda x, mask: L.cast(call(x * 1.0, mask), "float64"))
    np.testing.assert_array_equal(found, call(X * 1.0, MASK[:, :, None]).astype("float64"))


@pytest.mark.parametrize("name", ["and_", "or_", "xor"])
def test_logical_operands_begin_together(name: str) -> None:
    call = getattr(operator, name)
    found = run(lambda x, mask: L.cast(call(x > 10, mask > 2), "float64"))
    np.testing.assert_array_equal(found, call(X > 10, MASK[:, :, None] > 2).astype("float64"))


@pytest.mark.parametrize("which", ["left", "right", "both"])
def test_operands_of_unknown_sizes_begin_together(which: str) -> None:
    def build(x: Any, mask: Any) -> Any:
        left = x if which == "right" else of_unknown_size(x)
        right = mask if which == "left" else of_unknown_size(mask)
        return left * right

    np.testing.assert_array_equal(run(build), X * MASK[:, :, None])


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv"])
def test_assigning_operators_make_another_variable(name: str) -> None:
    call = getattr(operator, name)
    found = run(lambda x, mask: [before := x * 1.0, call(before, 2.0)][0])
    np.testing.assert_array_equal(found, X)
    np.testing.assert_array_equal(run(lambda x, mask: call(x * 1.0, 2.0)), call(X.copy(), 2.0))


def test_assigning_operators_of_a_module_write_as_in_torch() -> None:
    class Writing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            doubled = name = x * 1.0
            name *= 2.0
            return doubled

    np.testing.assert_array_equal(run(lambda x, mask: Writing()(x)), X * 2.0)
