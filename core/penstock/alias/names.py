"""The table of Fluid 1.8's names: where each lives in Penstock, how it differs, or what to use instead.

`sections.py` reads it. A name that a module of Fluid imports from another one is looked up there.
Reading the table imports no torch; a look-up does.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.alias.sections import Module, read_modules
from penstock.imports import importing_torch

FLUID = "paddle.fluid"
DEFAULT_ADVICE = "docs/fluid-api.md lists what is there"
INTERNAL = "it is internal to Fluid; docs/fluid-api.md lists the public names"


class Standing(StrEnum):
    """Whether a name of Fluid is in Penstock."""

    THERE = "there"
    DIFFERS = "differs"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """Not a name of Fluid 1.8 that the table has."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name of Fluid. `note`: how it differs, or what to use instead; `value` only if it is there."""

    path: str
    standing: Standing
    note: str = ""
    value: Any = None

    @property
    def refusal(self) -> str:
        """What an error says about a name that is not there."""
        if self.standing is Standing.UNKNOWN:
            return f"{self.path} is no name of Fluid 1.8 that Penstock knows{self.note}"
        return f"{self.path} of Fluid 1.8 is not in Penstock; {self.note}"


class Table:
    """All modules of Fluid that the table has, and the packages above them. `release`: what `fluid.toml` is of."""

    def __init__(self, modules: Mapping[str, Module], release: str = "") -> None:
        self.modules = modules
        self.release = release

    def look_up(self, module: str, name: str) -> Name:
        """Return what `module.name` is; a module of Fluid is no name."""
        found = self._in_fluid(module, name, frozenset())
        if found is not None:
            return found
        for path in self._places(self.modules[module]):
            if name in _public(_walk(path), whole=bool(self.modules[module].whole)):
                return Name(f"{module}.{name}", Standing.THERE, value=_walk(f"{path}.{name}"))
        return Name(f"{module}.{name}", Standing.UNKNOWN, self._similar(module, name))

    def module_at(self, module: str, name: str) -> str:
        """Return the path of the module of Fluid that `module.name` is; empty if it is none."""
        owners = (owner for owner in self._owners(module) if owner.path == module or owner.gives(name))
        imported = (owner.imports.get(name, "") for owner in owners)
        return next((path for path in (f"{module}.{name}", *imported) if path in self.modules), "")

    def public(self, module: str) -> tuple[str, ...]:
        """Return the names that `import *` gives in Fluid, modules included, sorted."""
        found = self.modules[module]
        if found.names is None:
            own = {name for name in (*found.defines, *found.imports, *found.more) if not name.startswith("_")}
            below = found.stars
        else:
            own, below = {*found.names, *found.modules}, found.exports
        return tuple(sorted(own.union(*(self.public(path) for path in below))))

    def is_late(self, module: str) -> bool:
        """Whether a name that `module` lacks is refused at its use, not where it is imported."""
        parts = module.split(".")
        return any(self.modules[".".join(parts[:n])].late for n in range(1, len(parts) + 1))

    def split(self, path: str) -> tuple[str, str, str]:
        """Return the module, the name in it and the attributes of it that a dotted path means."""
        parts = path.split(".")
        depth = max((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in self.modules), default=0)
        module, name = ".".join(parts[:depth]), "".join(parts[depth : depth + 1])
        above = ".".join(parts[: depth - 1])
        if above in self.modules and any(o.has(parts[depth - 1]) for o in self._owners(above)):
            if not name or self.look_up(module, name).standing is Standing.UNKNOWN:  # fluid.data: a function, too
                module, name, depth = above, parts[depth - 1], depth - 1
        return module, name, ".".join(parts[depth + 1 :])

    def _owners(self, module: str) -> Iterator[Module]:
        """Iterate over the module and those whose names it has as well, each once."""
        paths, seen = [module], set()
        while paths:
            path = paths.pop(0)
            if path not in seen:
                seen.add(path)
                yield self.modules[path]
                paths = [*self.modules[path].exports, *self.modules[path].stars, *paths]

    def _in_fluid(self, module: str, name: str, seen: frozenset[str]) -> Name | None:
        """Return what a name of the module is, or of the module that it is imported from; None if it has none."""
        absent = None
        for owner in self._owners(module):
            if owner.path != module and not owner.gives(name):
                continue
            found = self._found(owner, name) if owner.has(name) else None
            if found is not None and (found.standing is not Standing.MISSING or name in owner.instead):
                return found
            absent = absent or found
            origin, _, original = owner.imports.get(name, "").rpartition(".")
            if origin and f"{origin}.{original}" not in self.modules and owner.path not in seen:
                followed = self._in_fluid(origin, original, seen | {owner.path})
                if followed is not None:
                    return followed
        return absent

    def _found(self, owner: Module, name: str) -> Name:
        path = f"{owner.path}.{name}"
        places = [owner.at[name]] if name in owner.at else [f"{place}.{name}" for place in self._places(owner)]
        for place in places:
            value = _walk(place)
            if value is not None and not (isinstance(value, ModuleType) and name in owner.defines):
                note = owner.differs.get(name, "")
                return Name(path, Standing.DIFFERS if note else Standing.THERE, note, value)
        is_internal = name not in (owner.names or ())
        return Name(
            path, Standing.MISSING, owner.instead.get(name) or self._advice(owner.path, is_internal=is_internal)
        )

    def _places(self, owner: Module) -> tuple[str, ...]:
        if owner.whole:
            return (owner.whole,)
        return tuple("" if place == "." else place for place in owner.here) or (
            (owner.path.removeprefix(FLUID).removeprefix("."),) if owner.path.startswith(FLUID) else ()
        )

    def _advice(self, path: str, *, is_internal: bool) -> str:
        while path:
            if self.modules[path].advice:
                return self.modules[path].advice
            path = path.rpartition(".")[0]
        return INTERNAL if is_internal else DEFAULT_ADVICE

    def _similar(self, module: str, name: str) -> str:
        close = difflib.get_close_matches(name, self.public(module), n=1)
        return f"; did you mean {module}.{close[0]}?" if close else ""


def _walk(path: str) -> Any:
    """Return the object at a path below `penstock`; None if there is none."""
    found: Any = importlib.import_module("penstock")
    with importing_torch():
        for part in filter(None, path.split(".")):
            value = getattr(found, part, None)
            found = _submodule(found, part) if value is None else value
    return found


def _public(module: Any, *, whole: bool) -> Sequence[str]:
    """Return the names of a module that are Fluid's, too: of one of Penstock's in Fluid's place, all."""
    return dir(module) if whole else getattr(module, "__all__", ())


def _submodule(found: Any, part: str) -> ModuleType | None:
    if not isinstance(found, ModuleType):
        return None
    name = f"{found.__name__}.{part}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name or error.name == found.__name__:
            return None
        raise  # a library that the module needs


@cache
def table() -> Table:
    """Return the table, which is read once."""
    release, modules = read_modules(Path(__file__).parent)
    return Table(modules, release)
