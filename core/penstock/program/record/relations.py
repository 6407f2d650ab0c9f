"""Relations of sizes: what torch or a line of the user's asks of them, and what holds for every batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.program.record import arithmetic
from penstock.program.record.arithmetic import Size, never_above

RelationOp = Literal["==", "!=", "<", "<=", ">", ">="]
HOLDS: Mapping[RelationOp, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
MIRRORED: Mapping[RelationOp, RelationOp] = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_NEGATED: Mapping[RelationOp, RelationOp] = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@dataclass(frozen=True, slots=True)
class Relation:
    """`left op right`."""

    op: RelationOp
    left: Size
    right: Size

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right}"

    def negated(self) -> Relation:
        """Return the opposite."""
        return Relation(_NEGATED[self.op], self.left, self.right)

    def at(self, point: Mapping[str, int]) -> bool:
        """Whether it holds at a point."""
        return HOLDS[self.op](self.left.value(point), self.right.value(point))

    def always(self) -> bool | None:
        """Whether it holds for every batch (True) or for none (False); None if that depends or is not seen."""
        if self.op in ("!=", ">", "<"):
            found = self.negated().always()
            return None if found is None else not found
        if self.op == ">=":
            return Relation("<=", self.right, self.left).always()
        left, right = self.left, self.right
        if self.op == "==" and left == right:
            return True
        above = never_above(arithmetic.add(right, arithmetic.ONE), left)
        if self.op == "<=":
            return True if never_above(left, right) else False if above else None
        return False if above or never_above(arithmetic.add(left, arithmetic.ONE), right) else None


@dataclass(frozen=True, slots=True)
class All:
    """Conditions that hold together."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition."""

    part: Condition


Condition = bool | Relation | All | Not


@dataclass(frozen=True, slots=True)
class Real:
    """A floating-point number that follows from sizes, which no Program holds. `size`: the size that it is, if any."""

    size: Size | None = None

    def __str__(self) -> str:
        return "a floating-point number of sizes" if self.size is None else f"float({self.size})"


@dataclass(frozen=True, slots=True)
class Asked:
    """A relation that was found to hold. `line`: the user's that asked; '' if torch itself asked, within a call."""

    relation: Relation
    line: str
