"""A size is found from its values at a few batches, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.program.record.arithmetic import Size, constant, floordiv, mul, symbol
from penstock.program.record.fitting import Basis

S, T = symbol("s0"), symbol("s1")
POINTS = [{"s0": n, "s1": m} for n, m in ((7920, 7921), (7963, 8003), (7998, 7940), (8101, 8011), (7935, 8100), (3, 1))]
FOUND: dict[str, tuple[Callable[[int, int], int], str]] = {
    "a number": (lambda n, m: 12, "12"),
    "a symbol": (lambda n, m: m, "s1"),
    "a line": (lambda n, m: 26 * n + 3, "(s0 * 26) + 3"),
    "a sum of symbols": (lambda n, m: n + 2 * m - 1, "s0 + (s1 * 2) + (-1)"),
    "a product of symbols": (lambda n, m: 4 * n * m, "s0 * s1 * 4"),
    "a place in a matrix": (lambda n, m: (n - 1) * m, "(s0 * s1) + (s1 * (-1))"),
    "pairs of rows": (lambda n, m: n * (n - 1) // 2, "((s0 * (-1)) + (s0 * s0)) // 2"),
    "a half, rounded down": (lambda n, m: n // 2, "s0 // 2"),
    "a window with a stride": (lambda n, m: (m - 5) // 3 + 1, "(s1 + (-2)) // 3"),
}
NOT_FOUND: dict[str, Callable[[int, int], int]] = {
    "another branch for a few rows": lambda n, m: max(n, 4),
    "a square root": lambda n, m: int(n**0.5),
    "parity": lambda n, m: n % 2,
}


@pytest.mark.parametrize("name", FOUND)
def test_a_size_is_found_from_its_values(name: str) -> None:
    function, expected = FOUND[name]
    found = Basis([S, T], POINTS).fit([function(p["s0"], p["s1"]) for p in POINTS])
    assert str(found) == expected


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_is_no_such_size_is_not_found(name: str) -> None:
    values = [NOT_FOUND[name](p["s0"], p["s1"]) for p in POINTS]
    assert Basis([S, T], POINTS).fit(values) is None


def test_an_operands_own_size_is_preferred() -> None:
    even = [{"s0": 2 * n} for n in (40, 61, 77, 93)]
    half = floordiv(S, constant(2))
    assert Basis([half, S], even).fit([p["s0"] // 2 for p in even]) == half


def test_too_few_points_find_no_line() -> None:
    few: list[dict[str, int]] = POINTS[:3]
    products: list[Size] = [mul(S, T)]
    assert Basis([S, T], few).fit([5, 9, 1]) is None
    assert Basis(products, few).fit([5, 9, 1]) is None
