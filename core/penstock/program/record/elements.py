"""Elements of recorded variables as sizes: `layers.shape(x)[1] - 1` is an expression of symbols.

They are found in the operators that make the variable: `shape`, and what picks, joins, casts and calculates its
elements. What follows from data has no such expression. Within a loop neither has a constant from before it, since the
loop may write it further down: its counter. In a step of a recurrence it has, which no step may write then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from penstock.program.ir import Arg, Operator, Ref
from penstock.program.record.recording import Recording

_KEPT = {"aten._to_copy", "aten.clone", "aten.alias", "aten.view", "aten.squeeze", "aten.unsqueeze", "aten.reshape"}
_FILLED = {"aten.new_full": 2, "aten.full": 1}
_CALCULATED: dict[str, Callable[[Any, Any], Any]] = {
    "aten.add": operator.add,
    "aten.sub": operator.sub,
    "aten.mul": operator.mul,
    "aten.floor_divide": operator.floordiv,
}


def elements_of(recording: Recording, name: str) -> list[Any] | None:
    """Return the sizes that are the elements of a variable, in order; None if they are not known."""
    return _Makers(recording).elements(name)


def distance(recording: Recording, first: str, second: str) -> int | None:
    """Return second - first, numbers that both follow from data, where constants alone lie between; None else.

    Both have to be of one value: nothing writes the variable that they follow from between their operators.
    """
    makers = _Makers(recording)
    (root, offset, at), (other, other_offset, other_at) = makers.rooted(first), makers.rooted(second)
    if root != other or makers.version(root, at) != makers.version(root, other_at):
        return None
    return other_offset - offset


class _Makers:
    """The operator that makes each variable; None for what is written in place."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._made = recording, dict[str, Operator | None]()
        self._places: dict[str, int] = {}
        for place, op in enumerate(recording.program.operators):
            self._made |= dict.fromkeys(op.output_names(), op)
            self._made |= dict.fromkeys((*op.writes, *map(self._storage, op.writes)))
            self._places |= dict.fromkeys(op.output_names(), place)

    def _storage(self, name: str) -> str:
        return self._recording.program.variables[name].storage

    def _maker(self, name: str) -> Operator | None:
        op = self._made.get(name)
        return op if op is not None and self._made.get(self._storage(name)) else None

    def elements(self, name: str, *, is_joined: bool = False) -> list[Any] | None:
        """The elements; `is_joined`: of a part of what is known to be the sizes of another variable."""
        op = self._maker(name)
        if op is None:
            return None
        kind = op.type.rpartition(".")[0]
        if kind in _FILLED:
            is_counter = not is_joined and self._may_be_written(name)
            return None if is_counter else _filled(self._recording, name, op.args[_FILLED[kind]])
        if kind == "aten.cat":
            parts = [self._operand(part, is_joined=True) for part in op.args[0]]  # type: ignore[union-attr]  # a tuple
            return None if any(part is None for part in parts) else [size for part in parts for size in part or ()]
        source = self._operand(op.args[0], is_joined=is_joined) if op.args else None
        if source is None:
            return None
        if kind in ("aten.select", "aten.slice"):
            return _picked(kind, source, op.args[1:])
        if kind in _CALCULATED:
            return _calculated(_CALCULATED[kind], source, self._operand(op.args[1], is_joined=is_joined))
        return source if kind in _KEPT else None

    def _operand(self, value: Arg, *, is_joined: bool) -> list[Any] | None:
        if isinstance(value, Ref):
            return self.elements(value.name, is_joined=is_joined)
        return [self._recording.symbols.size(value)]  # type: ignore[arg-type]  # an int or an Expr

    def _may_be_written(self, name: str) -> bool:
        """Whether a loop that is recorded now may give a constant another value; a recurrence notes that it may not."""
        around = [block for block in self._recording.open_blocks if self._places[name] < block.start]
        if any(block.repeats for block in around):
            return True
        for block in around:
            block.constants.add(self._storage(name))
        return False

    def version(self, name: str, place: int) -> tuple[int, int]:
        """What a variable's value is one of as the operator at `place` reads it: writes before, and loops around."""
        storage = self._storage(name)
        before = self._recording.program.operators[:place]
        writes = sum(storage in map(self._storage, op.writes) for op in before)
        return writes, sum(
            block.start <= place for block in self._recording.open_blocks if block.repeats or block.is_step
        )

    def rooted(self, name: str, place: int | None = None) -> tuple[str, int, int]:
        """The variable that a number follows from by adding constants, their sum, and where it is read."""
        place = len(self._recording.program.operators) if place is None else place
        op = self._maker(name)
        kind = "" if op is None else op.type.rpartition(".")[0]
        if op is None or not op.args or not isinstance(op.args[0], Ref):
            return name, 0, place
        if kind in _KEPT:
            return self.rooted(op.args[0].name, self._places[name])
        added = self._operand(op.args[1], is_joined=False) if kind in ("aten.add", "aten.sub") else None
        if op.kwargs or added is None or len(added) != 1 or not isinstance(added[0], int):
            return name, 0, place
        root, offset, place = self.rooted(op.args[0].name, self._places[name])
        return root, offset + (added[0] if kind == "aten.add" else -added[0]), place


def _filled(recording: Recording, name: str, value: Arg) -> list[Any] | None:
    count = 1
    for size in recording.program.variables[name].shape:
        if not isinstance(size, int):
            return None
        count *= size
    return None if isinstance(value, float) else [recording.symbols.size(value)] * count  # type: ignore[arg-type]  # an int or an Expr


def _picked(kind: str, source: list[Any], args: Sequence[Any]) -> list[Any] | None:
    if args and args[0] != 0:
        return None
    if kind == "aten.select":
        return [source[args[1]]]
    start, end, step = (*args[1:], *(None, None, None))[:3]
    return source[start:end:step]


def _calculated(function: Callable[[Any, Any], Any], left: list[Any], right: list[Any] | None) -> list[Any] | None:
    if right is None or (len(left) != len(right) and 1 not in (len(left), len(right))):
        return None
    length = max(len(left), len(right))
    pairs = zip(left * (length // len(left)), right * (length // len(right)), strict=True)
    return [function(one, other) for one, other in pairs]
