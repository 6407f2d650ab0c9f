"""Nests of lists, tuples and dictionaries: `fluid.layers.utils`. Values of a dictionary are in the order of its keys.

Source: python/paddle/fluid/layers/utils.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import SpecError

__all__ = ["assert_same_structure", "convert_to_list", "flatten", "is_sequence", "map_structure", "pack_sequence_as"]


def is_sequence(seq: Any) -> bool:
    """Whether a value is a nest: a list, a tuple or a dictionary."""
    return isinstance(seq, Mapping) or (isinstance(seq, Sequence) and not isinstance(seq, (str, bytes)))


def _parts(nest: Any) -> list[Any]:
    return [nest[key] for key in sorted(nest)] if isinstance(nest, Mapping) else list(nest)


def flatten(nest: Any) -> list[Any]:
    """Return the values of a nest that are none themselves, in order."""
    return [leaf for part in _parts(nest) for leaf in flatten(part)] if is_sequence(nest) else [nest]


def convert_to_list(value: Any, n: int, name: str, dtype: Callable[[Any], Any] = int) -> list[Any]:
    """Return a number `n` times, or `n` numbers as a list. `name`: of the argument, for the error.

    Raises SpecError for another count, or for what `dtype` does not convert. Source: fluid.layers.utils.
    """
    if not is_sequence(value):
        value = [value] * n
    numbers = list(value)
    try:
        _ = [dtype(number) for number in numbers]
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name} is {value!r}; expected a number or {n} of them") from error
    if len(numbers) != n:
        raise SpecError(f"{name} is {value!r}; expected a number or {n} of them, not {len(numbers)}")
    return numbers


def pack_sequence_as(structure: Any, flat_sequence: Sequence[Any]) -> Any:
    """Return a nest like `structure` of other values. Raises SpecError for too few or too many."""
    count = len(flatten(structure))
    if len(flat_sequence) != count:
        raise SpecError(f"{len(flat_sequence)} values do not fill {structure!r}, which has {count}")
    return _packed(structure, iter(flat_sequence))


def _packed(structure: Any, values: Iterator[Any]) -> Any:
    if not is_sequence(structure):
        return next(values)
    if isinstance(structure, Mapping):
        made = {key: _packed(structure[key], values) for key in sorted(structure)}
        return type(structure)((key, made[key]) for key in structure)  # type: ignore[call-arg]  # a dict of some kind
    parts: Any = [_packed(part, values) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)


def map_structure(func: Callable[..., Any], *structure: Any) -> Any:
    """Return a nest like the first of `func(value of the first, of the second, …)`."""
    return pack_sequence_as(structure[0], [func(*values) for values in zip(*map(flatten, structure), strict=False)])


def assert_same_structure(nest1: Any, nest2: Any, check_types: bool = True) -> None:
    """Raise SpecError unless both are nests of the same form; `check_types`: of the same types and keys, too."""
    if is_sequence(nest1) != is_sequence(nest2):
        raise SpecError(f"{nest1!r} and {nest2!r} are not of one structure: only one of them is a nest")
    if not is_sequence(nest1):
        return
    if check_types and type(nest1) is not type(nest2):
        raise SpecError(f"{nest1!r} and {nest2!r} are not of one structure: {type(nest1)} and {type(nest2)}")
    if check_types and isinstance(nest1, Mapping) and set(nest1) != set(nest2):
        raise SpecError(f"{nest1!r} and {nest2!r} are not of one structure: keys {sorted(nest1)} and {sorted(nest2)}")
    parts = _parts(nest1), _parts(nest2)
    if len(parts[0]) != len(parts[1]):
        raise SpecError(f"{nest1!r} and {nest2!r} are not of one structure: {len(parts[0])} and {len(parts[1])} parts")
    for one, other in zip(*parts, strict=True):
        assert_same_structure(one, other, check_types)
