"""Checks of what a script says (`log`, `progress`), made where it says it: an error belongs to the line that is wrong.

Pure. Integers of any kind (`numpy.int64`, a tensor of one integer) become Python's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import SupportsFloat, SupportsIndex

END = 2**63  # the server keeps counts as signed 64-bit numbers


def checked_count(value: SupportsIndex, name: str) -> int:
    """Return `value` as an int. Raises TypeError if it is no integer, ValueError if it is not in [0, 2**63)."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; expected an integer") from error
    if not 0 <= number < END:
        raise ValueError(f"{name} is {number}; expected 0 or more, and less than 2**63")
    return number


def checked_scalars(values: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Return finite numbers as floats, others as None. Raises TypeError, and ValueError for a name that is no text."""
    return {_checked_name(name): _finite(value) for name, value in values.items()}


def _finite(value: SupportsFloat) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def _checked_name(name: str) -> str:
    if not name or "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"scalar name is {name!r}; expected text without NUL and without lone surrogates")
    return name
