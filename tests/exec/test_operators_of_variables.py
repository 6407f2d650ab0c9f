"""Operators of Variables as in Fluid: where a batch is first they begin together, `+=` makes another variable,
and whole numbers have whole quotients."""

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


COUNTS, SHARES = np.array([-7, 7, 8, 0]), np.array([2, -2, 3, 5])


def run_whole(build: Callable[[Any, Any], Any], dtype: str = "int64") -> np.ndarray:
    main, exe = fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        made = build(fluid.data("counts", [None], dtype), fluid.data("shares", [None], dtype))
    return np.asarray(exe.run(main, {"counts": COUNTS.astype(dtype), "shares": SHARES.astype(dtype)}, [made])[0])


WHOLE: dict[str, tuple[Callable[[Any, Any], Any], list[int]]] = {
    "variables": (lambda a, b: a / b, [-3, -3, 2, 0]),
    "by an int": (lambda a, b: a / 2, [-3, 3, 4, 0]),
    "by a float": (lambda a, b: a / 2.0, [-3, 3, 4, 0]),
    "by a number of numpy": (lambda a, b: a / np.int64(2), [-3, 3, 4, 0]),
    "of a number": (lambda a, b: 7 / b, [3, -3, 2, 1]),
    "assigned": (operator.itruediv, [-3, -3, 2, 0]),
    "layer": (L.elementwise_div, [-3, -3, 2, 0]),
}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", WHOLE)
def test_quotients_of_whole_numbers_are_whole(case: str, dtype: str) -> None:
    build, wanted = WHOLE[case]
    found = run_whole(build, dtype)  # as C++ divides, towards zero
    assert (found.dtype, found.tolist()) == (np.dtype(dtype), wanted)


def test_a_fraction_or_a_float_makes_a_quotient_of_floats() -> None:
    np.testing.assert_allclose(run_whole(lambda a, b: a / 2.5), COUNTS / 2.5, rtol=1e-6)
    np.testing.assert_allclose(run_whole(lambda a, b: a / L.cast(b, "float64")), COUNTS / SHARES)


def test_modules_divide_whole_numbers_as_torch_does() -> None:
    class Dividing(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a / b

    np.testing.assert_allclose(run_whole(Dividing()), COUNTS / SHARES, rtol=1e-6)
