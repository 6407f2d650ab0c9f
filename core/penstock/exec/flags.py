"""Process-wide flags under Fluid's names: what `set_flags` has set, else the environment, else the default."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import SpecError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}

Value = bool | str | float


@dataclass(frozen=True, slots=True)
class _Flag:
    """`environment`: variables that set it, the first one that is there wins. `words`: its values.

    Without words it is a number if its default is a float, else 1 or 0.
    """

    environment: tuple[str, ...]
    default: Value
    words: tuple[str, ...] = ()

    def value(self, name: str, text: str) -> Value:
        """Return the value of a text. Raises SpecError if it is none of the words, or no truth value."""
        word = text.strip().lower()
        if isinstance(self.default, float):
            return _number(name, word)
        expected = " or ".join(self.words) or "1 or 0"
        if word not in (self.words or _TRUE | _FALSE):
            raise SpecError(f"{name} is {text!r}; expected {expected}", got=text, expected=expected)
        return word if self.words else word in _TRUE


_KNOWN = {
    "FLAGS_check_nan_inf": _Flag(("PENSTOCK_CHECK_NAN", "FLAGS_check_nan_inf"), False),
    "FLAGS_matrix_kernels": _Flag(
        ("PENSTOCK_MATRIX_KERNELS", "FLAGS_matrix_kernels"), "auto", ("auto", "torch", "onednn")
    ),
    # Fluid's defaults are -1 (no limit) and 1 (one layer a bucket); measurements are in docs/graph.md.
    "FLAGS_fuse_parameter_memory_size": _Flag(("FLAGS_fuse_parameter_memory_size",), 0.0625),
    "FLAGS_fuse_parameter_groups_size": _Flag(("FLAGS_fuse_parameter_groups_size",), -1.0),
    "FLAGS_eager_delete_tensor_gb": _Flag(("FLAGS_eager_delete_tensor_gb",), 0.0),
}
_set: dict[str, Value] = {}


def set_flags(flags: Mapping[str, object]) -> None:
    """Set flags for this process. Raises SpecError, with nothing set, for one that is unknown or has another value."""
    _set.update({name: _flag(name).value(name, str(value)) for name, value in flags.items()})


def get_flags(flags: str | Sequence[str]) -> dict[str, Value]:
    """Return the values of flags by name. Raises SpecError for one that is unknown."""
    return {name: _value(name) for name in ([flags] if isinstance(flags, str) else flags)}


def value_of(name: str) -> bool:
    """Return the value of a flag that is on or off now."""
    return bool(_value(name))


def text_of(name: str) -> str:
    """Return the value of a flag that is a word now."""
    return str(_value(name))


def number_of(name: str) -> float:
    """Return the value of a flag that is a number now."""
    return float(_value(name))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SpecError(f"{name} is {text!r}; expected a number", got=text, expected="a number")
    return value


def _value(name: str) -> Value:
    flag = _flag(name)
    if name in _set:
        return _set[name]
    for variable in flag.environment:
        if variable in os.environ:
            return flag.value(variable, os.environ[variable])
    return flag.default


def _flag(name: str) -> _Flag:
    if name not in _KNOWN:
        raise SpecError(f"flag {name!r} has no effect in Penstock; expected one of {sorted(_KNOWN)}", got=name)
    return _KNOWN[name]
