"""Integer expressions in the batch symbols, as they stand in shapes and operator arguments.

Closed under `+ * // % max min`; everything else is refused when it is recorded. Text is parsed by the
grammar in `text.py`, never by `eval`: Programs travel between machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal

ExprOp = Literal["sym", "+", "*", "//", "%", "max", "min"]


@dataclass(frozen=True, slots=True)
class Expr:
    """A node. `op == "sym"`: `args` holds the symbol's name; otherwise operands (ints or nodes)."""

    op: ExprOp
    args: tuple[Expr | int | str, ...]

    def __str__(self) -> str:
        return _text(self, 0)

    def symbols(self) -> frozenset[str]:
        """Return the names of all symbols in the expression."""
        if self.op == "sym":
            return frozenset({str(self.args[0])})
        return frozenset().union(*(a.symbols() for a in self.args if isinstance(a, Expr)))

    def evaluate(self, bindings: Mapping[str, int]) -> int:
        """Return the value under `bindings`. Raises KeyError for an unbound symbol."""
        if self.op == "sym":
            return bindings[str(self.args[0])]
        values = [evaluate(a, bindings) for a in self.args if not isinstance(a, str)]
        return _fold(self.op, values)


Dim = int | Expr


def sym(name: str) -> Expr:
    """Return the expression that is one symbol."""
    return Expr("sym", (name,))


def evaluate(value: Dim, bindings: Mapping[str, int]) -> int:
    """Return the integer that `value` is under `bindings`."""
    return value.evaluate(bindings) if isinstance(value, Expr) else value


def renamed(value: Dim, names: Mapping[str, str | Dim]) -> Dim:
    """Return `value` with other names for some of its symbols, or with sizes in their place."""
    if not isinstance(value, Expr):
        return value
    if value.op == "sym":
        new = names.get(str(value.args[0]), str(value.args[0]))
        return sym(new) if isinstance(new, str) else new
    return Expr(value.op, tuple(a if isinstance(a, str) else renamed(a, names) for a in value.args))


def _fold(op: str, values: list[int]) -> int:
    match op:
        case "+":
            return sum(values)
        case "*":
            return reduce(lambda a, b: a * b, values, 1)
        case "//":
            return values[0] // values[1]
        case "%":
            return values[0] % values[1]
        case "max":
            return max(values)
        case "min":
            return min(values)
    raise ValueError(f"unknown expression operator {op!r}")


_LEVEL = {"+": 1, "*": 2, "//": 2, "%": 2}


def _text(value: Expr | int | str, level: int) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"({value})" if value < 0 and level else str(value)
    if value.op == "sym":
        return str(value.args[0])
    if value.op in ("max", "min"):
        return f"{value.op}({', '.join(_text(a, 0) for a in value.args)})"
    mine = _LEVEL[value.op]
    # Operands one level up, so that the tree that was printed is the tree that is read back.
    body = f" {value.op} ".join(_text(a, mine + 1) for a in value.args)
    return f"({body})" if level >= mine else body
