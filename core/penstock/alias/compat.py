"""`paddle.compat`: text and bytes of Python 2 and 3. Source: python/paddle/compat.py (Fluid 1.8)."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

__all__ = ["floor_division", "get_exception_message", "long_type", "round", "to_bytes", "to_text"]

long_type = int


def to_text(obj: Any, encoding: str = "utf-8", inplace: bool = False) -> Any:
    """Return bytes as str, also those in a list or set (`inplace`: in the same one); anything else as it is."""
    return _each(obj, lambda one: one.decode(encoding) if isinstance(one, bytes) else one, inplace=inplace)


def to_bytes(obj: Any, encoding: str = "utf-8", inplace: bool = False) -> Any:
    """Return str as bytes, also those in a list or set (`inplace`: in the same one); anything else as it is."""
    return _each(obj, lambda one: one.encode(encoding) if isinstance(one, str) else one, inplace=inplace)


def _each(obj: Any, convert: Callable[[Any], Any], *, inplace: bool) -> Any:
    if not isinstance(obj, (list, set)):
        return convert(obj)
    converted = type(obj)(map(convert, obj))
    if not inplace:
        return converted
    obj.clear()
    (obj.extend if isinstance(obj, list) else obj.update)(converted)
    return obj


def round(x: float, d: int = 0) -> float:
    """Return `x` rounded to `d` digits, halves away from zero, as Python 2 did."""
    unit = decimal.Decimal(1).scaleb(-d)
    return float(decimal.Decimal(x).quantize(unit, decimal.ROUND_HALF_UP))


def floor_division(x: Any, y: Any) -> Any:
    """Return `x // y`."""
    return x // y


def get_exception_message(exc: BaseException) -> str:
    """Return the text of an exception."""
    return str(exc)
