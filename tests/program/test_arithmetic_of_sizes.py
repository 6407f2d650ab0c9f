"""Canonical sizes have the value of the expression that they were made of, and are equal where they have to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.program.expr import evaluate
from penstock.program.record import arithmetic
from penstock.program.record.arithmetic import Size, constant, symbol

S, T = symbol("s0"), symbol("s1")
BINARY: dict[str, tuple[Callable[[Size, Size], Size], Callable[[int, int], int]]] = {
    "+": (arithmetic.add, lambda a, b: a + b),
    "-": (arithmetic.sub, lambda a, b: a - b),
    "*": (arithmetic.mul, lambda a, b: a * b),
    "//": (arithmetic.floordiv, lambda a, b: a // b),
    "%": (arithmetic.mod, lambda a, b: a % b),
    "max": (arithmetic.maximum, max),
    "min": (arithmetic.minimum, min),
}
Formula = Any
FORMULAS: st.SearchStrategy[Formula] = st.recursive(
    st.one_of(st.sampled_from(["s0", "s1"]), st.integers(-7, 9)),
    lambda inner: st.tuples(st.sampled_from(list(BINARY)), inner, inner),
    max_leaves=7,
)
POINTS = [{"s0": 1, "s1": 1}, {"s0": 2, "s1": 5}, {"s0": 7, "s1": 3}, {"s0": 12, "s1": 30}]


def size_of(formula: Formula) -> Size:
    """Return a formula in canonical form. Raises ZeroDivisionError."""
    if isinstance(formula, tuple):
        op, left, right = formula
        return BINARY[op][0](size_of(left), size_of(right))
    return symbol(formula) if isinstance(formula, str) else constant(formula)


def value_of(formula: Formula, point: dict[str, int]) -> int:
    """Return what a formula is at a point, by Python's own operators. Raises ZeroDivisionError."""
    if isinstance(formula, tuple):
        op, left, right = formula
        return BINARY[op][1](value_of(left, point), value_of(right, point))
    return point[formula] if isinstance(formula, str) else int(formula)


@given(FORMULAS)
def test_a_size_has_the_value_of_its_formula(formula: Formula) -> None:
    for point in POINTS:
        try:
            expected = value_of(formula, point)
            size = size_of(formula)
        except ZeroDivisionError:
            continue
        assert size.value(point) == evaluate(size.dim, point) == expected
        low, high = arithmetic.bounds(size)
        assert (low is None or low <= expected) and (high is None or expected <= high)


@given(FORMULAS, FORMULAS)
def test_never_above_is_no_guess(left: Formula, right: Formula) -> None:
    try:
        one, other = size_of(left), size_of(right)
        values = [(one.value(point), other.value(point)) for point in POINTS]
    except ZeroDivisionError:
        return
    assert not arithmetic.never_above(one, other) or all(a <= b for a, b in values)


@given(FORMULAS)
def test_a_size_is_what_its_text_says(formula: Formula) -> None:
    for point in POINTS:
        try:
            size = size_of(formula)
            expected = size.value(point), arithmetic.of_dim(size.dim).value(point)
        except ZeroDivisionError:
            continue
        assert expected[0] == expected[1]


EQUAL: dict[str, tuple[Size, Size]] = {
    "a product is expanded": (
        arithmetic.mul(S, arithmetic.add(S, constant(2))),
        size_of(("+", ("*", "s0", "s0"), ("*", 2, "s0"))),
    ),
    "a factor is cancelled": (size_of(("//", ("*", "s0", 26), 13)), size_of(("*", "s0", 2))),
    "a symbol is cancelled": (size_of(("//", ("*", "s0", "s1"), "s1")), S),
    "whole parts are divided": (size_of(("//", ("+", ("*", 4, "s0"), 3), 2)), size_of(("+", ("*", 2, "s0"), 1))),
    "quotients are joined": (size_of(("//", ("//", "s0", 2), 3)), size_of(("//", "s0", 6))),
    "no rest is zero": (size_of(("%", ("*", "s0", 6), 3)), constant(0)),
    "a rest has its factor out": (size_of(("%", ("*", "s0", 4), 20)), size_of(("*", 4, ("%", "s0", 5)))),
    "a bound that never binds is left out": (size_of(("max", "s0", 1)), S),
    "an extreme is flat": (size_of(("min", ("min", "s0", 9), 4)), size_of(("min", 4, "s0"))),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_sizes_have_one_form(name: str) -> None:
    one, other = EQUAL[name]
    assert one == other


KNOWN: list[tuple[Formula, Formula, bool]] = [
    ("s0", ("*", 2, "s0"), True),
    (("min", 20, "s0"), "s0", True),
    ("s0", ("max", 20, "s0"), True),
    (0, ("-", "s0", 1), True),
    ("s0", 4, False),
    (("//", "s0", 2), "s0", False),  # true, and not seen
]


@pytest.mark.parametrize(("left", "right", "known"), KNOWN)
def test_what_holds_for_every_batch_is_known(left: Formula, right: Formula, known: bool) -> None:
    assert arithmetic.never_above(size_of(left), size_of(right)) == known
