"""Settings as objects with known fields: an unknown name, or a value of another type, is refused by name.

A field that has no effect is stored, and logs why when it is set to something else than its default, once in a process.
Pure data.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar, Self

from penstock.errors import SpecError
from penstock.logger import warn_once

_log = logging.getLogger(__name__)


class StrictFields:
    """Base: see the module. Fields are a class's annotated names with a default, and those of its `_defaults`, which
    stand behind properties or are lists. The type of a default is that of the field; None means True, False or None.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    _least: ClassVar[dict[str, int]] = {}
    _without_effect: ClassVar[Mapping[str, str]] = {}  # field -> why, in half a sentence

    def __init_subclass__(cls) -> None:
        plain = [
            name for name, kind in cls.__annotations__.items() if name in vars(cls) and "ClassVar" not in str(kind)
        ]
        cls._defaults = {**cls._defaults, **{name: getattr(cls, name) for name in plain}}
        for name in plain:
            delattr(cls, name)  # an unset field is not found in the class

    def __init__(self) -> None:
        self.__dict__.update({k: list(v) if isinstance(v, list) else v for k, v in self._defaults.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name not in self._defaults:
            close = difflib.get_close_matches(name, self._defaults, n=3)
            hint = f" (did you mean {' or '.join(repr(c) for c in close)}?)" if close else ""
            raise SpecError(f"{kind} has no field {name!r}{hint}; it has {', '.join(sorted(self._defaults))}", got=name)
        if "_user" in self.__dict__:
            raise SpecError(
                f"{kind}.{name} = {value!r} comes too late: {self.__dict__['_user']} was made with this strategy, and "
                f"would not see it. Set it before, or change a copy: copy.copy(strategy)",
                got=value,
            )
        default = self._defaults[name]
        if not _fits(value, default) or (isinstance(default, int) and value < self._least.get(name, value)):
            expected = _expected(default, self._least.get(name, 0))
            raise SpecError(f"{kind}.{name} is {value!r}; expected {expected}", got=value, expected=expected)
        if name in self._without_effect and value != default:
            why = self._without_effect[name]
            warn_once(_log, f"{kind}.{name} = {value!r} is stored but has no effect: {why}")
        self.__dict__[name] = list(value) if isinstance(default, list) else value

    def __copy__(self) -> Self:
        """Return one with the same fields that no executor has used yet."""
        copied = type(self)()
        copied.__dict__.update({name: self.__dict__[name] for name in self._defaults})
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        changed = {k: self.__dict__[k] for k, default in self._defaults.items() if self.__dict__[k] != default}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def _expected(default: Any, least: int) -> str:
    if isinstance(default, IntEnum):
        return f"one of {', '.join(m.name for m in type(default))}"
    if isinstance(default, list):
        return "a list of str"
    if isinstance(default, int) and not isinstance(default, bool) and least:
        return f"int from {least} on"
    return "True, False or None" if default is None else type(default).__name__


def _fits(value: Any, default: Any) -> bool:
    if default is None:
        return value is None or isinstance(value, bool)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, IntEnum):
        return isinstance(value, type(default))
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if isinstance(default, list):
        return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(v, str) for v in value)
    return isinstance(value, type(default))
