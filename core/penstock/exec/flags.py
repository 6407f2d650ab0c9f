"""Process-wide flags under Fluid's names: what `set_flags` said last, else the environment, else the default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import SpecError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class _Flag:
    """`environment`: variables that set it, the first one that is there wins."""

    environment: tuple[str, ...]
    default: bool


_KNOWN = {"FLAGS_check_nan_inf": _Flag(("PENSTOCK_CHECK_NAN", "FLAGS_check_nan_inf"), False)}
_set: dict[str, bool] = {}


def set_flags(flags: Mapping[str, object]) -> None:
    """Set flags for this process. Raises SpecError, with nothing set, for one that is unknown or no truth value."""
    for name in flags:
        _flag(name)
    _set.update({name: _truth(name, str(value)) for name, value in flags.items()})


def get_flags(flags: str | Sequence[str]) -> dict[str, bool]:
    """Return the values of flags by name. Raises SpecError for one that is unknown."""
    return {name: value_of(name) for name in ([flags] if isinstance(flags, str) else flags)}


def value_of(name: str) -> bool:
    """Return the value of a flag now."""
    flag = _flag(name)
    if name in _set:
        return _set[name]
    for variable in flag.environment:
        if variable in os.environ:
            return _truth(variable, os.environ[variable])
    return flag.default


def _flag(name: str) -> _Flag:
    if name not in _KNOWN:
        raise SpecError(f"flag {name!r} has no effect in Penstock; expected one of {sorted(_KNOWN)}", got=name)
    return _KNOWN[name]


def _truth(name: str, value: str) -> bool:
    text = value.strip().lower()
    if text not in _TRUE | _FALSE:
        raise SpecError(f"{name} is {value!r}; expected 1 or 0", got=value)
    return text in _TRUE
