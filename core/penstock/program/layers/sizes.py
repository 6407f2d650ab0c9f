"""Sizes that a script computes as variables, `layers.shape(x)[0]`, where a layer needs a size.

A size of a Program is an expression of symbols, so it is found in the operators that make the variable: `shape`, and
what picks, joins, casts and calculates its elements. What follows from data has no such expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ProgramError
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable

_KEPT = {"aten._to_copy", "aten.clone", "aten.alias", "aten.view", "aten.squeeze", "aten.unsqueeze", "aten.reshape"}
_FILLED = {"aten.new_full": 2, "aten.full": 1}
_CALCULATED: dict[str, Callable[[Any, Any], Any]] = {
    "aten.add": operator.add,
    "aten.sub": operator.sub,
    "aten.mul": operator.mul,
    "aten.floor_divide": operator.floordiv,
}


def sizes_in(shape: Any) -> list[Any]:
    """Return the sizes in `shape`: a variable of them, or a sequence of ints and variables of one element.

    Raises ProgramError for a variable whose value does not follow from sizes alone.
    """
    if isinstance(shape, Variable):
        return _elements_of(shape)
    return [size for given in shape for size in (_elements_of(given) if isinstance(given, Variable) else [given])]


def known_size(value: Any) -> Any:
    """Return the size that a number or a variable of one element is; None for a value that follows from data."""
    if not isinstance(value, Variable):
        return value
    found = _elements(value._recording, _makers(value._recording), value.name)
    return found[0] if found is not None and len(found) == 1 else None


def _elements_of(variable: Variable) -> list[Any]:
    recording = variable._recording
    found = _elements(recording, _makers(recording), variable.name)
    if found is None:
        raise ProgramError(
            f"{user_line()}: {variable!r} is used as a size, which cannot follow from data. Sizes are numbers, or "
            "elements of layers.shape(x)",
            variable=variable.name,
        )
    return found


def _makers(recording: Recording) -> dict[str, Operator | None]:
    """The operator that makes each variable; None for what is written in place."""
    made: dict[str, Operator | None] = {}
    for op in recording.program.operators:
        made |= dict.fromkeys(op.output_names(), op)
        made |= dict.fromkeys(op.writes)
    return made


def _elements(recording: Recording, makers: dict[str, Operator | None], name: str) -> list[Any] | None:
    """The sizes that are the elements of a variable, in order; None if they are not known."""
    op = makers.get(name)
    if op is None or makers.get(recording.program.variables[name].storage) is None:
        return None
    kind = op.type.rpartition(".")[0]

    def operand(value: Arg) -> list[Any] | None:
        return _elements(recording, makers, value.name) if isinstance(value, Ref) else [recording.symbols.size(value)]  # type: ignore[arg-type]  # an int or an Expr

    if kind in _FILLED:
        return _filled(recording, name, op.args[_FILLED[kind]])
    if kind == "aten.cat":
        parts = [operand(part) for part in op.args[0]]  # type: ignore[union-attr]  # a tuple
        return None if any(part is None for part in parts) else [size for part in parts for size in part or ()]
    source = operand(op.args[0])
    if source is None:
        return None
    if kind in ("aten.select", "aten.slice"):
        return _picked(kind, source, op.args[1:])
    if kind in _CALCULATED:
        return _calculated(_CALCULATED[kind], source, operand(op.args[1]))
    return source if kind in _KEPT else None


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
