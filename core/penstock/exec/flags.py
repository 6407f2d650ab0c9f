"""Process-wide flags under Fluid's names: the last value of `set_flags`, else the environment, else the default."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from penstock.errors import SpecError
from penstock.log import warn_once
from penstock.settings import (
    CHECK_NAN,
    EAGER_DELETE,
    FUSE_GROUPS_SIZE,
    FUSE_MEMORY_SIZE,
    MATRIX_KERNELS,
    Setting,
    warn_deprecated,
)  # fmt: skip

_log = logging.getLogger(__name__)
T = TypeVar("T")
Value = bool | str | float

_KNOWN: Mapping[str, Setting[Any]] = {
    CHECK_NAN.same_as: CHECK_NAN,
    **{one.name: one for one in (MATRIX_KERNELS, FUSE_MEMORY_SIZE, FUSE_GROUPS_SIZE, EAGER_DELETE)},
}
_DEPRECATED = {MATRIX_KERNELS.same_as: MATRIX_KERNELS}
_set: dict[str, Any] = {}  # of the process, as Fluid's flags are
_without_effect: dict[str, Any] = {}


def set_flags(flags: Mapping[str, object]) -> None:
    """Set flags for this process. Raises SpecError, with nothing set, for one that is unknown or has another value."""
    found = {name: _flag(name) for name in flags}
    _set.update({flag.name: flag.parsed(str(flags[name]).strip(), name) for name, flag in found.items()})


def get_flags(flags: str | Sequence[str]) -> dict[str, Value]:
    """Return the values of flags by name. Raises SpecError for one that is unknown."""
    return {name: value_of(_flag(name)) for name in ([flags] if isinstance(flags, str) else flags)}


class FlagsByName(MutableMapping[str, Any]):
    """Flags as a mapping, `fluid.core.globals()`. One of Fluid's that Penstock has not is kept, with a warning."""

    def __getitem__(self, name: str) -> Any:
        if name in _without_effect:
            return _without_effect[name]
        return value_of(_flag(name))

    def __setitem__(self, name: str, value: object) -> None:
        if name in _KNOWN or name in _DEPRECATED or not name.startswith("FLAGS_"):
            set_flags({name: value})
            return
        warn_once(_log, f"the flag {name} has no effect in Penstock", about=name)
        _without_effect[name] = value

    def __delitem__(self, name: str) -> None:
        raise SpecError(f"flag {name!r} cannot be taken away; set it to another value")

    def __iter__(self) -> Iterator[str]:
        return iter([*_KNOWN, *_without_effect])

    def __len__(self) -> int:
        return len(_KNOWN) + len(_without_effect)


def flags_by_name() -> FlagsByName:
    """Return the flags of this process as a mapping."""
    return FlagsByName()


def value_of(flag: Setting[T]) -> T:
    """Return the value of a flag now. Raises SpecError for one in the environment that is wrong."""
    return _set[flag.name] if flag.name in _set else flag.read()


def _flag(name: str) -> Setting[Any]:
    if name in _DEPRECATED:
        warn_deprecated(name, _DEPRECATED[name].name)
        return _DEPRECATED[name]
    if name not in _KNOWN:
        raise SpecError(f"flag {name!r} has no effect in Penstock; expected one of {sorted(_KNOWN)}", got=name)
    return _KNOWN[name]
