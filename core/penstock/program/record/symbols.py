"""Turn torch's symbolic sizes (sympy) into `Expr`, and the guards of a ShapeEnv into `Guard`."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy has no types
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Guard

_BINARY: dict[Any, Any] = {FloorDiv: "//", Mod: "%", PythonMod: "%"}
_RELATION: dict[Any, Any] = {
    sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">=",
}  # fmt: skip


class SymbolTable:
    """Names of the size symbols of one Program: torch calls them s77, a Program s0, s1, …"""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.shape_env = shape_env
        self.names: dict[sympy.Symbol, str] = {}
        self._num_guards = 0

    def add(self, size: torch.SymInt, name: str) -> None:
        """Give the symbol of `size` its name in the Program."""
        self.names[size.node.expr] = name

    def dim(self, size: int | torch.SymInt) -> Dim:
        """Return the expression of a size. Raises ProgramError for operators that Programs do not have."""
        if isinstance(size, torch.SymInt):
            return self.expr(size.node.expr)
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
        """Return the guards that arose since the last call. Raises ProgramError if one pins a symbol to a number."""
        fresh = self.shape_env.guards[self._num_guards :]
        self._num_guards = len(self.shape_env.guards)
        guards: list[Guard] = []
        for shape_guard in fresh:
            guards.extend(self._guard(shape_guard.expr, source))
        return guards

    def _guard(self, expr: Any, source: str) -> list[Guard]:
        if isinstance(expr, sympy.And):
            return [g for part in expr.args for g in self._guard(part, source)]
        if isinstance(expr, sympy.Not):
            expr = sympy.simplify(expr)
        if expr in (sympy.true, True):
            return []
        relation = _RELATION.get(type(expr))
        if relation is None:
            raise ProgramError(
                f"{source}: the program branches on {expr}, which cannot be kept as a guard", source=source
            )
        self._refuse_pin(expr, relation, source)
        return [Guard(self._raw(expr.lhs), relation, self._raw(expr.rhs), source)]

    def _refuse_pin(self, expr: Any, relation: str, source: str) -> None:
        sides = (expr.lhs, expr.rhs)
        symbols = [s for s in sides if s in self.names]
        if relation != "==" or not symbols or not any(s.is_Integer for s in sides):
            return
        for symbol in symbols:  # undo, so that the program can still be recorded after the error
            self.shape_env.replacements.pop(symbol, None)
        number = next(int(s) for s in sides if s.is_Integer)
        raise ProgramError(
            f"{source}: this line turns the batch size into the number {number} (int(x.shape[0]), len(x), range or a "
            "Python loop over the batch), so the program would run with this batch size alone. Keep the size "
            "symbolic: use x.shape[0] itself, -1 in reshape, or torch operations over the whole batch",
            source=source,
        )

    def _raw(self, value: Any) -> Dim:
        """`expr` without the replacements that the guard itself has caused."""
        if value in self.names:
            return Expr("sym", (self.names[value],))
        return self.expr(value)
