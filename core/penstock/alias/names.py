"""The table of Fluid 1.8's names (`names.toml`): where each lives in Penstock, how it differs, or what to use instead.

A section is a module of Fluid. `names`: what its `__all__` lists; `more`: other names that scripts use; `exports`:
modules whose names it has as well. A name is looked up in `at` (name -> path), then under its own name in the modules
of `here`, by default the module of the same path. Paths are relative to `penstock`. `whole`: the module is one of
Penstock's. `differs` and `instead` are texts for a name, `advice` for every name that is not there. `late`: such a name
is refused where it is used, also one of the modules below.
Whether a name is there is never written down: it is looked up. Reading the table imports no torch; a look-up does.
"""

from __future__ import annotations

import difflib
import importlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import Bug

FLUID = "paddle.fluid"
DEFAULT_ADVICE = "docs/fluid-api.md lists what is there"


class Standing(StrEnum):
    """Whether a name of Fluid is in Penstock."""

    THERE = "there"
    DIFFERS = "differs"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """Not a name of Fluid 1.8 that the table has."""


@dataclass(frozen=True, slots=True)
class Module:
    """A section of the table."""

    path: str
    names: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    whole: str = ""
    at: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    late: bool = False


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
    """All modules of Fluid that the table has, and the packages above them."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules

    def look_up(self, module: str, name: str) -> Name:
        """Return what `module.name` is; a module of Fluid is no name."""
        for owner in self._owners(module):
            if name in owner.names or name in owner.more:
                return self._found(owner, name)
        for path in self._places(self.modules[module]):
            if name in _public(_walk(path), whole=bool(self.modules[module].whole)):
                return Name(f"{module}.{name}", Standing.THERE, value=_walk(f"{path}.{name}"))
        return Name(f"{module}.{name}", Standing.UNKNOWN, self._similar(module, name))

    def public(self, module: str) -> tuple[str, ...]:
        """Return the names that `import *` gives in Fluid, sorted."""
        return tuple(sorted({name for owner in self._owners(module) for name in owner.names}))

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
        if above in self.modules and any(parts[depth - 1] in o.names + o.more for o in self._owners(above)):
            if not name or self.look_up(module, name).standing is Standing.UNKNOWN:  # fluid.data: a function, too
                module, name, depth = above, parts[depth - 1], depth - 1
        return module, name, ".".join(parts[depth + 1 :])

    def _owners(self, module: str) -> Iterator[Module]:
        """Iterate over the module and what it exports."""
        found = self.modules[module]
        yield found
        for path in found.exports:
            yield from self._owners(path)

    def _found(self, owner: Module, name: str) -> Name:
        path = f"{owner.path}.{name}"
        places = [owner.at[name]] if name in owner.at else [f"{place}.{name}" for place in self._places(owner)]
        for place in places:
            value = _walk(place)
            if value is not None:
                note = owner.differs.get(name, "")
                return Name(path, Standing.DIFFERS if note else Standing.THERE, note, value)
        return Name(path, Standing.MISSING, owner.instead.get(name) or self._advice(owner.path))

    def _places(self, owner: Module) -> tuple[str, ...]:
        if owner.whole:
            return (owner.whole,)
        return tuple("" if place == "." else place for place in owner.here) or (
            (owner.path.removeprefix(FLUID).removeprefix("."),) if owner.path != "paddle" else ()
        )

    def _advice(self, path: str) -> str:
        while path:
            if self.modules[path].advice:
                return self.modules[path].advice
            path = path.rpartition(".")[0]
        return DEFAULT_ADVICE

    def _similar(self, module: str, name: str) -> str:
        close = difflib.get_close_matches(name, self.public(module), n=1)
        return f"; did you mean {module}.{close[0]}?" if close else ""


def _walk(path: str) -> Any:
    """Return the object at a path below `penstock`; None if there is none."""
    found: Any = importlib.import_module("penstock")
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
    sections = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
    modules = {path: _module(path, section) for path, section in sections.items()}
    for path in list(modules):
        while path := path.rpartition(".")[0]:
            modules.setdefault(path, Module(path))
    return Table(modules)


def _module(path: str, section: Mapping[str, Any]) -> Module:
    known = {part.name for part in fields(Module)} - {"path"}
    if not section.keys() <= known:
        raise Bug(f"names.toml: [{path}] has {sorted(section.keys() - known)}; expected {sorted(known)}")
    names, more, exports, here = (tuple(section.get(key, "").split()) for key in ("names", "more", "exports", "here"))
    at, differs, instead = (section.get(key, {}) for key in ("at", "differs", "instead"))
    whole, advice = section.get("whole", ""), section.get("advice", "")
    return Module(path, names, more, exports, here, whole, at, differs, instead, advice, section.get("late", False))
