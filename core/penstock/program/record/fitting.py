"""Sizes as functions of the batch: from their values at a few batches to an expression that gives all of them.

Candidates, simplest first: a number, a size of the operands, `a * size + b`, a sum over symbols, products of two sizes,
`(a * size + b) // q`. What gives every value is taken; there are more values than a candidate has coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement

from penstock.program.record import arithmetic
from penstock.program.record.arithmetic import Atom, Size, constant

Point = Mapping[str, int]
_LARGEST_DIVISOR = 256
_LARGEST_FRACTION = 256
FACTORS = (1, 2, 3, 5, 7)


def multiple(base: Point, number: int, *, apart: bool) -> dict[str, int]:
    """Return a point of multiples. `apart`: by another factor for each symbol, as small sizes agree by chance."""
    shifts = range(len(base)) if apart and number else [0] * len(base)
    chosen = zip(base.items(), shifts, strict=True)
    return {name: at * FACTORS[(number + shift) % len(FACTORS)] for (name, at), shift in chosen}


def branch(atom: Atom, point: Point) -> int:
    """Return which operand of a `min` or `max` it is at a point."""
    values = [size.value(point) for size in atom.args]
    return values.index(min(values) if atom.op == "min" else max(values))


class Basis:
    """The sizes that a result may be made of, with their values at the points where it was asked for."""

    def __init__(self, sizes: Sequence[Size], points: Sequence[Point]) -> None:
        self.points = points
        self.columns = [(size, tuple(size.value(point) for point in points)) for size in sizes]

    def fit(self, values: Sequence[int]) -> Size | None:
        """Return the size with these values at the points; None if no candidate has them."""
        if len(set(values)) == 1:
            return constant(values[0])
        for find in (self._same, self._line, self._sum, self._product, self._quotient):
            found = find(tuple(values))
            if found is not None:
                return found
        return None

    def _same(self, values: tuple[int, ...]) -> Size | None:
        return next((size for size, column in self.columns if column == values), None)

    def _line(self, values: tuple[int, ...]) -> Size | None:
        return next((found for size, column in self.columns if (found := _on_line(size, column, values))), None)

    def _sum(self, values: tuple[int, ...]) -> Size | None:
        """A number for each symbol and one more."""
        names = sorted(self.points[0])
        rows = [[Fraction(1), *(Fraction(point[name]) for name in names)] for point in self.points]
        found = _solved(rows, [Fraction(value) for value in values])
        if found is None or any(factor.denominator != 1 for factor in found):
            return None
        size = constant(int(found[0]))
        for name, factor in zip(names, found[1:], strict=True):
            size = arithmetic.add(size, arithmetic.scaled(arithmetic.symbol(name), int(factor)))
        return size

    def _product(self, values: tuple[int, ...]) -> Size | None:
        for (one, left), (other, right) in combinations_with_replacement(self.columns, 2):
            column = tuple(a * b for a, b in zip(left, right, strict=True))
            found = _on_line(arithmetic.mul(one, other), column, values)
            if found is None:  # a * one * other + b * one
                apart = [left] if one == other else [left, right]
                rows = [[Fraction(n) for n in (1, *numbers)] for numbers in zip(column, *apart, strict=True)]
                found = _of_factors(_solved(rows, [Fraction(v) for v in values]), one, other)
            if found is not None:
                return found
        return None

    def _quotient(self, values: tuple[int, ...]) -> Size | None:
        for size, column in self.columns:
            for found in _quotients(size, column, values):
                if tuple(found.value(point) for point in self.points) == values:
                    return found
        return None


def _on_line(size: Size, column: Sequence[int], values: Sequence[int]) -> Size | None:
    run = [(x, y) for x, y in zip(column, values, strict=True) if x != column[0]]
    if not run:
        return None
    slope, rest = divmod(run[0][1] - values[0], run[0][0] - column[0])
    start = values[0] - slope * column[0]
    if rest or any(slope * x + start != y for x, y in zip(column, values, strict=True)):
        return None
    return arithmetic.add(arithmetic.scaled(size, slope), constant(start))


def _of_factors(found: Sequence[Fraction] | None, one: Size, other: Size) -> Size | None:
    """`a * one * other + b * one + c * other + d`, of fractions as well: n * (n - 1) // 2."""
    if found is None:
        return None
    common = math.lcm(*(factor.denominator for factor in found))
    size = constant(int(found[0] * common))
    for factor, part in zip(found[1:], (arithmetic.mul(one, other), one, other), strict=False):  # one is other
        size = arithmetic.add(size, arithmetic.scaled(part, int(factor * common)))
    return arithmetic.floordiv(size, constant(common)) if common <= _LARGEST_FRACTION else None


def _solved(rows: Sequence[Sequence[Fraction]], values: Sequence[Fraction]) -> list[Fraction] | None:
    """The solution of an overdetermined system by elimination; None if it has none or several."""
    table = [[*row, value] for row, value in zip(rows, values, strict=True)]
    width = len(rows[0])
    if len(rows) <= width:
        return None
    for column in range(width):
        pivot = next((i for i in range(column, len(table)) if table[i][column]), None)
        if pivot is None:
            return None
        table[column], table[pivot] = table[pivot], table[column]
        lead = table[column]
        for i, row in enumerate(table):
            if i != column and row[column]:
                share = row[column] / lead[column]
                table[i] = [a - share * b for a, b in zip(row, lead, strict=True)]
    if any(row[width] for row in table[width:]):
        return None
    return [table[i][width] / table[i][i] for i in range(width)]


def _quotients(size: Size, column: Sequence[int], values: Sequence[int]) -> Iterator[Size]:
    """Candidates (a * size + b) // q + c, by the slope between the points that are farthest apart."""
    low, high = min(range(len(column)), key=column.__getitem__), max(range(len(column)), key=column.__getitem__)
    if column[low] == column[high]:
        return
    about = Fraction(values[high] - values[low], column[high] - column[low])
    seen: set[Fraction] = set()
    for largest in range(2, _LARGEST_DIVISOR + 1):
        slope = about.limit_denominator(largest)
        if slope in seen or slope.denominator == 1:
            continue
        seen.add(slope)
        a, q = slope.numerator, slope.denominator
        # values = floor((a x + b) / q): q * value <= a x + b < q * value + q, for every point
        least = max(q * y - a * x for x, y in zip(column, values, strict=True))
        most = min(q * y + q - 1 - a * x for x, y in zip(column, values, strict=True))
        if least <= 0 <= most:
            least = most = 0
        if least == most:
            top = arithmetic.add(arithmetic.scaled(size, a), constant(least))
            yield arithmetic.floordiv(top, constant(q))


Fit = Callable[[Sequence[int]], Size | None]
