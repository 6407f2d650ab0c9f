"""Turn torch's symbolic sizes (sympy) into `Expr`, and the guards of a ShapeEnv into `Guard`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from traceback import FrameSummary
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy has no types
import torch

from penstock.compat.torch import (
    FloorDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ShapeEnv,
    expression_of,
    forget_since,
    guard_frame,
    guards_since,
    shape_knowledge,
)
from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Guard
from penstock.program.record.source import line_of_frame

_BINARY: dict[Any, Any] = {FloorDiv: "//", Mod: "%", PythonMod: "%"}
_RELATION: dict[Any, Any] = {
    sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">=",
}  # fmt: skip

_OPERATION: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "max": torch.sym_max, "min": torch.sym_min,
}  # fmt: skip


class SymbolTable:
    """Names of the size symbols of one Program: torch calls them s77, a Program s0, s1, …"""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.shape_env = shape_env
        self.names: dict[sympy.Symbol, str] = {}
        self.sizes: dict[str, torch.SymInt] = {}
        self._known = shape_knowledge(self.shape_env)

    def add(self, size: torch.SymInt, name: str) -> None:
        """Give the symbol of `size` its name in the Program."""
        self.names[expression_of(size)] = name
        self.sizes[name] = size
        self._known = shape_knowledge(self.shape_env)

    def size(self, name: str) -> torch.SymInt:
        """Return torch's symbol for the one that the Program calls `name`."""
        return self.sizes[name]

    def dim(self, size: int | torch.SymInt) -> Dim:
        """Return the expression of a size. Raises ProgramError for operators that Programs do not have."""
        if isinstance(size, torch.SymInt):
            return self.expr(expression_of(size))
        return int(size)

    def expr(self, value: Any) -> Dim:
        """Return the expression of a sympy integer expression."""
        value = self.shape_env.replace(value)
        if value.is_Integer:
            return int(value)
        if value in self.names:
            return Expr("sym", (self.names[value],))
        if isinstance(value, (sympy.Add, sympy.Mul)):
            return self._sum_or_product(value)
        for cls, op in _BINARY.items():
            if isinstance(value, cls):
                return Expr(op, (self.expr(value.args[0]), self.expr(value.args[1])))
        if isinstance(value, (Max, sympy.Max)):
            return Expr("max", tuple(self.expr(a) for a in value.args))
        if isinstance(value, (Min, sympy.Min)):
            return Expr("min", tuple(self.expr(a) for a in value.args))
        if isinstance(value, sympy.Pow) and value.exp.is_Integer and int(value.exp) > 0:
            return Expr("*", (self.expr(value.base),) * int(value.exp))
        raise ProgramError(
            f"a size is {value}, which a Program cannot hold (it knows + * // % max min of batch symbols); "
            "write the size as such an expression"
        )

    def _sum_or_product(self, value: Any) -> Expr:
        op = "+" if isinstance(value, sympy.Add) else "*"
        terms = sorted(value.args, key=lambda a: (a.is_Integer, str(a)))
        return Expr(op, tuple(self.expr(a) for a in terms))  # type: ignore[arg-type]  # op is one of ExprOp

    def new_guards(self, source: str) -> list[Guard]:
        """Return the guards that arose since the last call, each with the line that asked for it.

        Raises ProgramError if one pins a symbol to a number; what was learnt since the last call is forgotten then.
        """
        fresh = guards_since(self.shape_env, self._known)
        if not fresh:
            return []
        guards: list[Guard] = []
        forgets, dropped = True, False
        try:
            for asked in fresh:
                line = _line(asked)
                found = self._guard(asked.expr, line or source, "" if line else "a call of torch's")
                kept = [g for g in found if line or not _asks_for_few(g)]
                dropped = dropped or len(kept) < len(found)
                guards += kept
            forgets = dropped
        finally:
            if forgets:
                forget_since(self.shape_env, self._known)
            else:
                self._known = shape_knowledge(self.shape_env)
        return guards

    def forget_guards(self, source: str, asker: str) -> list[Guard]:
        """Forget the relations that arose since the last call, so that a branch of the user's evaluates them again.

        `asker`: the operator that was called. Returns those that its results depend on: a cut size that is equal to
        another (`min(20, s0) == 20`), which the kernel may broadcast where it is not. Raises ProgramError if one pins
        a symbol to a number.
        """
        fresh = guards_since(self.shape_env, self._known)
        if fresh:
            forget_since(self.shape_env, self._known)
        found = [guard for asked in fresh for guard in self._guard(asked.expr, source, asker)]
        return [g for g in found if g.relation == "==" and any(_is_cut(side) for side in (g.left, g.right))]

    def _guard(self, expr: Any, source: str, asker: str = "") -> list[Guard]:
        if isinstance(expr, sympy.And):
            return [g for part in expr.args for g in self._guard(part, source, asker)]
        if isinstance(expr, sympy.Not):
            expr = sympy.simplify(expr)
        if expr in (sympy.true, True):
            return []
        relation = _RELATION.get(type(expr))
        if relation is None:
            raise ProgramError(
                f"{source}: the program branches on {expr}, which cannot be kept as a guard", source=source
            )
        self._refuse_pin(expr, relation, source, asker)
        return [Guard(self._raw(expr.lhs), relation, self._raw(expr.rhs), source)]

    def _refuse_pin(self, expr: Any, relation: str, source: str, asker: str) -> None:
        sides = (expr.lhs, expr.rhs)
        # x.shape[0] * 4 == 31680 pins the batch as well; x.shape[0] % 2 == 0 is a relation.
        sizes = [s for s in sides if not s.is_Integer and not s.has(*_BINARY, Max, Min, sympy.Max, sympy.Min)]
        if relation != "==" or not sizes or not any(s.is_Integer for s in sides):
            return
        number = next(int(s) for s in sides if s.is_Integer)
        if asker:
            raise ProgramError(
                f"{source}: {asker} cannot run with a symbolic batch: torch itself turns the batch size into the "
                f"number {number} there. Write it by other torch operations",
                source=source,
            )
        raise ProgramError(
            f"{source}: this line turns the batch size into the number {number} (int(x.shape[0]), len(x), range or a "
            "Python loop over the batch), so the program would run with this batch size alone. Keep the size "
            "symbolic: use x.shape[0] itself, -1 in reshape, or torch operations over the whole batch; make tensors of "
            "that size by x.new_ones or in an nn.Module's forward",
            source=source,
        )

    def _raw(self, value: Any) -> Dim:
        """`expr` without the replacements that the guard itself has caused."""
        if value in self.names:
            return Expr("sym", (self.names[value],))
        return self.expr(value)


def _line(asked: Any) -> str:
    """The user's line that asked for a guard; '' if torch itself asked, within a call."""
    frame = guard_frame(asked)
    return line_of_frame(frame.filename, frame.lineno) if isinstance(frame, FrameSummary) else ""


def _is_cut(size: Dim) -> bool:
    """Whether `min` or `max` occurs in a size."""
    parts = [a for a in size.args if not isinstance(a, str)] if isinstance(size, Expr) else []
    return isinstance(size, Expr) and (size.op in ("min", "max") or any(map(_is_cut, parts)))


def symbolic(size: Dim, symbols: Mapping[str, Any]) -> Any:
    """Return the value of a size under torch's symbols, where `Expr.evaluate` would decide `min` and `max`."""
    if not isinstance(size, Expr):
        return size
    if size.op == "sym":
        return symbols[str(size.args[0])]
    return reduce(_OPERATION[size.op], [symbolic(a, symbols) for a in size.args if not isinstance(a, str)])


def _asks_for_few(guard: Guard) -> bool:
    """Whether torch asks if a size is 0 or 1, to choose between forms that give the same result."""
    number, small = guard.right, isinstance(guard.right, int) and 0 <= guard.right <= 2
    differs = guard.relation == "!=" and number in (0, 1)
    exceeds = guard.relation in (">", ">=") and small and _is_cut(guard.left)
    return differs or exceeds or _holds_from_two(guard)


def _holds_from_two(guard: Guard) -> bool:
    """Whether a guard excludes nothing but batches of no row or one; kept, it would refuse batch 1."""
    symbols = {s for side in (guard.left, guard.right) if isinstance(side, Expr) for s in side.symbols()}
    sizes = (2, 3, 4, 5, 7, 8, 16, 100, 1 << 20)
    return all(guard.holds(dict.fromkeys(symbols, size)) for size in sizes)
