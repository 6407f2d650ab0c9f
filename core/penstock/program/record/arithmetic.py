"""Exact arithmetic of sizes: polynomials over size symbols, `//`, `%`, `max` and `min`, in one canonical form.

Equal sizes have the same `key`, as far as the rules below see it: sums and products are expanded, common factors of a
quotient are cancelled, and what divides without a rest is divided. A symbol is a positive integer. No I/O, no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Literal

from penstock.program.expr import Dim, Expr, ExprOp

Call = Literal["//", "%", "max", "min"]


class Atom:
    """A factor that is not taken apart: a symbol, or a call of `//`, `%`, `max`, `min`. Equal by `key`."""

    __slots__ = ("args", "expr", "key", "op")

    def __init__(self, op: Literal["sym"] | Call, args: tuple[Size, ...], expr: Expr) -> None:
        self.op, self.args, self.expr, self.key = op, args, expr, str(expr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def value(self, point: Mapping[str, int]) -> int:
        """Return its value at a point: symbol -> number."""
        if self.op == "sym":
            return point[self.key]
        values = [size.value(point) for size in self.args]
        match self.op:
            case "//":
                return values[0] // values[1]
            case "%":
                return values[0] % values[1]
            case "max":
                return max(values)
        return min(values)


Monomial = tuple[Atom, ...]
"""A product of atoms, sorted by key; () is 1."""


class Size:
    """A polynomial: `terms` maps monomials to coefficients other than 0. Equal by `key`."""

    __slots__ = ("dim", "key", "terms")

    def __init__(self, terms: dict[Monomial, int]) -> None:
        self.terms = terms
        self.dim = _dim(terms)
        self.key = str(self.dim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    __repr__ = __str__

    @property
    def number(self) -> int | None:
        """The number that it is, None if it depends on a symbol."""
        return self.dim if isinstance(self.dim, int) else None

    def value(self, point: Mapping[str, int]) -> int:
        """Return its value at a point: symbol -> number."""
        return sum(
            factor * math.prod(atom.value(point) for atom in monomial) for monomial, factor in self.terms.items()
        )

    def atoms(self) -> Iterable[Atom]:
        """Give each atom, those within the operands of others included."""
        for monomial in self.terms:
            for atom in monomial:
                yield atom
                for inner in atom.args:
                    yield from inner.atoms()


def _dim(terms: Mapping[Monomial, int]) -> Dim:
    parts: list[Dim] = []
    rest = terms.get((), 0)
    for monomial in sorted((m for m in terms if m), key=lambda m: tuple(atom.key for atom in m)):
        factors: list[Dim] = [atom.expr for atom in monomial]
        if terms[monomial] != 1:
            factors.append(terms[monomial])
        parts.append(_call("*", factors))
    if rest:
        parts.append(rest)
    return _call("+", parts) if parts else 0


def _call(op: ExprOp, args: list[Dim]) -> Dim:
    return args[0] if len(args) == 1 else Expr(op, tuple(args))


def constant(number: int) -> Size:
    """Return a size that is a number."""
    return Size({(): number} if number else {})


ONE = constant(1)


def symbol(name: str) -> Size:
    """Return the size that is one symbol."""
    return Size({(Atom("sym", (), Expr("sym", (name,))),): 1})


def of_dim(dim: Dim, bound: Mapping[str, Size] | None = None) -> Size:
    """Return the size that an expression of a Program is. `bound`: sizes that symbols stand for; else themselves."""
    if not isinstance(dim, Expr):
        return constant(dim)
    if dim.op == "sym":
        name = str(dim.args[0])
        return symbol(name) if bound is None else bound[name]
    return reduce(_CALLS[dim.op], [of_dim(arg, bound) for arg in dim.args if not isinstance(arg, str)])


def contiguous_strides(sizes: Sequence[Size]) -> list[Size]:
    """Return the strides of a tensor of these sizes without gaps."""
    found, step = [], ONE
    for size in reversed(sizes):
        found.append(step)
        step = mul(step, maximum(size, ONE))
    return found[::-1]


def add(a: Size, b: Size) -> Size:
    """Return a + b."""
    terms = dict(a.terms)
    for monomial, factor in b.terms.items():
        terms[monomial] = terms.get(monomial, 0) + factor
    return Size({monomial: factor for monomial, factor in terms.items() if factor})


def sub(a: Size, b: Size) -> Size:
    """Return a - b."""
    return add(a, scaled(b, -1))


def scaled(a: Size, factor: int) -> Size:
    """Return a times a number."""
    return Size({monomial: own * factor for monomial, own in a.terms.items()} if factor else {})


def mul(a: Size, b: Size) -> Size:
    """Return a * b."""
    terms: dict[Monomial, int] = {}
    for (left, one), (right, other) in itertools.product(a.terms.items(), b.terms.items()):
        monomial = tuple(sorted((*left, *right), key=lambda atom: atom.key))
        terms[monomial] = terms.get(monomial, 0) + one * other
    return Size({monomial: factor for monomial, factor in terms.items() if factor})


def floordiv(a: Size, b: Size) -> Size:
    """Return a // b. Raises ZeroDivisionError."""
    if b.number == 0:
        raise ZeroDivisionError(f"{a} // 0")
    a, b = _cancelled(a, b)
    if b.number == 1:
        return a
    if a.number is not None and b.number is not None:
        return constant(a.number // b.number)
    whole, rest = _divided(a, b)
    if whole.terms and (not rest.terms or b.number is not None):
        return add(whole, floordiv(rest, b))
    inner = _only(a, "//")
    if inner is not None and b.number is not None and inner.args[1].number is not None:
        return floordiv(inner.args[0], constant(inner.args[1].number * b.number))
    if b.number is not None and b.number > 0 and bounds(a)[0] is not None and never_above(a, constant(b.number - 1)):
        return constant(0) if never_above(constant(0), a) else _atom("//", a, b)
    return _atom("//", a, b)


def mod(a: Size, b: Size) -> Size:
    """Return a % b. Raises ZeroDivisionError."""
    if b.number == 0:
        raise ZeroDivisionError(f"{a} % 0")
    if a.number is not None and b.number is not None:
        return constant(a.number % b.number)
    whole, rest = _divided(a, b)
    if not rest.terms:
        return rest
    if b.number is not None and whole.terms:
        return mod(rest, b)
    least, divisor = _cancelled(a, b)
    if divisor != b:
        return mul(_divided(b, divisor)[0], mod(least, divisor))
    if never_above(constant(0), a) and never_above(add(a, ONE), b):
        return a
    return _atom("%", a, b)


def maximum(a: Size, b: Size) -> Size:
    """Return max(a, b)."""
    return _extreme("max", a, b, lambda one, other: never_above(other, one))


def minimum(a: Size, b: Size) -> Size:
    """Return min(a, b)."""
    return _extreme("min", a, b, never_above)


_CALLS: dict[str, Callable[[Size, Size], Size]] = {
    "+": add, "*": mul, "//": floordiv, "%": mod, "max": maximum, "min": minimum,
}  # fmt: skip


def _extreme(op: Call, a: Size, b: Size, wins: Callable[[Size, Size], bool]) -> Size:
    parts: dict[Size, None] = {}
    for size in (a, b):
        inner = _only(size, op)
        parts.update(dict.fromkeys(inner.args if inner is not None else (size,)))
    kept = list(parts)
    for one in list(kept):
        if any(other is not one and wins(other, one) for other in kept):
            kept.remove(one)
    kept.sort(key=lambda size: (size.number is None, size.key))
    return kept[0] if len(kept) == 1 else _atom(op, *kept)


def _atom(op: Call, *args: Size) -> Size:
    return Size({(Atom(op, args, Expr(op, tuple(arg.dim for arg in args))),): 1})


def _only(size: Size, op: Call) -> Atom | None:
    """The call that a size is, and nothing else; None if it is none of `op`."""
    if len(size.terms) == 1:
        (monomial, factor), *_ = size.terms.items()
        if factor == 1 and len(monomial) == 1 and monomial[0].op == op:
            return monomial[0]
    return None


def _cancelled(a: Size, b: Size) -> tuple[Size, Size]:
    """Both without the factors that they have in common; `b` positive where it is a number."""
    common = math.gcd(*a.terms.values(), *b.terms.values()) or 1
    if b.number is not None and b.number < 0:
        common = -common
    shared = next(iter(b.terms))
    for monomial in (*a.terms, *b.terms):
        shared = _shared(shared, monomial)

    def without(size: Size) -> Size:
        return Size({_quotient(m, shared) or (): factor // common for m, factor in size.terms.items()})

    return without(a), without(b)


def _shared(one: Monomial, other: Monomial) -> Monomial:
    """The atoms of both, each as often as in the one that has it less often."""
    rest, found = list(other), []
    for atom in one:
        if atom in rest:
            rest.remove(atom)
            found.append(atom)
    return tuple(found)


def _quotient(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """The atoms that are left; None if the divisor has one that the monomial lacks."""
    rest = list(monomial)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _divided(a: Size, b: Size) -> tuple[Size, Size]:
    """(whole, rest) with a == whole * b + rest, by the terms of `a` that `b` divides; a sum divides all or nothing."""
    if len(b.terms) > 1:
        return _divided_by_sum(a, b)
    (divisor, number), *_ = b.terms.items()
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, factor in a.terms.items():
        left = _quotient(monomial, divisor)
        if left is not None and factor % number == 0:
            whole[left] = factor // number
        else:
            rest[monomial] = factor
    return Size(whole), Size(rest)


def _divided_by_sum(a: Size, b: Size) -> tuple[Size, Size]:
    whole, rest, none = constant(0), a, constant(0)
    lead = max((m for m in b.terms), key=lambda m: (len(m), tuple(atom.key for atom in m)))
    for _ in range(len(a.terms) + 1):
        if not rest.terms:
            return whole, rest
        top = max(rest.terms, key=lambda m: (len(m), tuple(atom.key for atom in m)))
        left = _quotient(top, lead)
        if left is None or rest.terms[top] % b.terms[lead]:
            break
        part = Size({left: rest.terms[top] // b.terms[lead]})
        whole, rest = add(whole, part), sub(rest, mul(part, b))
    return none, a


def call_of(size: Size, op: Call) -> tuple[Size, ...] | None:
    """Return the operands of the call that a size is, and nothing else; None if it is no call of `op`."""
    found = _only(size, op)
    return None if found is None else found.args


def without_quotient(left: Size, right: Size, a: Size, b: Size) -> tuple[Size, Size]:
    """Return both sides of a relation, multiplied by b > 0 if a // b occurs in one, where b divides a."""
    quotient = _only(floordiv(a, b), "//")
    if quotient is None or all(m.count(quotient) != 1 for size in (left, right) for m in size.terms):
        return left, right

    def multiplied(size: Size) -> Size:
        found = constant(0)
        for monomial, factor in size.terms.items():
            rest = _quotient(monomial, (quotient,))
            term = mul(Size({monomial: factor}), b) if rest is None else mul(Size({rest: factor}), a)
            found = add(found, term)
        return found

    return multiplied(left), multiplied(right)


# ---------------------------------------------------------------- what is known of every batch

Bound = int | None
"""None: none."""


def bounds(size: Size) -> tuple[Bound, Bound]:
    """Return the smallest and the largest value, as far as it follows from positive symbols."""
    low: Bound = 0
    high: Bound = 0
    for monomial, factor in size.terms.items():
        least, most = _of_product(monomial)
        if factor < 0:
            least, most = most, least
        low = None if low is None or least is None else low + factor * least
        high = None if high is None or most is None else high + factor * most
    return low, high


def _of_product(monomial: Monomial) -> tuple[Bound, Bound]:
    low, high = 1, 1
    unbounded = False
    for atom in monomial:
        least, most = _of_atom(atom)
        if least is None or least < 0:
            return (least, most) if len(monomial) == 1 else (None, None)
        low *= least
        unbounded = unbounded or most is None
        high *= most or 0
    return low, None if unbounded else high


def _of_atom(atom: Atom) -> tuple[Bound, Bound]:
    if atom.op == "sym":
        return 1, None
    each = [bounds(arg) for arg in atom.args]
    lows, highs = [low for low, _ in each], [high for _, high in each]
    if atom.op in ("max", "min"):
        return _of_extreme(atom.op, lows, highs)
    divisor = atom.args[1].number
    if atom.op == "%":
        return (0, divisor - 1) if divisor is not None and divisor > 0 else (None, None)
    if divisor is None or divisor < 0:
        return (0, highs[0]) if lows[0] is not None and lows[0] >= 0 and (lows[1] or 0) > 0 else (None, None)
    return (None if lows[0] is None else lows[0] // divisor), (None if highs[0] is None else highs[0] // divisor)


def _of_extreme(op: str, lows: list[Bound], highs: list[Bound]) -> tuple[Bound, Bound]:
    known_lows, known_highs = [v for v in lows if v is not None], [v for v in highs if v is not None]
    all_lows, all_highs = len(known_lows) == len(lows), len(known_highs) == len(highs)
    if op == "max":
        return max(known_lows, default=None), max(known_highs) if all_highs else None
    return min(known_lows) if all_lows else None, min(known_highs, default=None)


def never_above(a: Size, b: Size) -> bool:
    """Whether a <= b for all positive symbols; False where the rules do not tell."""
    return _not_negative(sub(b, a), 3)


def _not_negative(size: Size, depth: int) -> bool:
    low, _ = bounds(size)
    if low is not None and low >= 0:
        return True
    if not depth:
        return False
    for monomial, factor in size.terms.items():
        if len(monomial) != 1 or monomial[0].op not in ("max", "min"):
            continue
        atom = monomial[0]
        rest = Size({m: f for m, f in size.terms.items() if m != monomial})
        forms = (_not_negative(add(rest, scaled(arg, factor)), depth - 1) for arg in atom.args)
        # -min(a, b) >= -a and max(a, b) >= a: one is enough; of the others each has to hold.
        if (any if (factor < 0) == (atom.op == "min") else all)(forms):
            return True
    return False
