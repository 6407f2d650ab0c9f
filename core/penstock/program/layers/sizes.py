"""Sizes that a script computes as variables, `layers.shape(x)[0]`, where a layer needs a size."""

from __future__ import annotations

from typing import Any

from penstock.errors import ProgramError
from penstock.program.record.elements import elements_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable


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
    found = elements_of(value._recording, value.name)
    return found[0] if found is not None and len(found) == 1 else None


def _elements_of(variable: Variable) -> list[Any]:
    found = elements_of(variable._recording, variable.name)
    if found is None:
        raise ProgramError(
            f"{user_line()}: {variable!r} is used as a size, which cannot follow from data. Sizes are numbers, or "
            "elements of layers.shape(x)",
            variable=variable.name,
        )
    return found
