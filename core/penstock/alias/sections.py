"""The modules of Fluid 1.8: their names (`fluid.toml`) and what Penstock has of them (`names.toml`).

A section of each file is a module. `fluid.toml` is read from a release by tools/fluid_names.py, which says what its
keys mean. In `names.toml`, `more` are other names that scripts use: of Fluid's C++ core, of releases before 1.8, or
some of those that no `__all__` lists. A name is looked up in `at` (name -> path), then under its own name in the
modules of `here`, by default the module of the same path. Paths are relative to `penstock`. `whole`: the module is one
of Penstock's. `differs` and `instead` are texts for a name, `advice` for every name that is not there. `late`: such a
name is refused where it is used, also one of the modules below.
Whether a name is there is never written down: it is looked up.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import Bug

_OF_FLUID = frozenset({"all", "all_of", "stars", "defines", "imports"})
_OF_PENSTOCK = frozenset({"more", "here", "whole", "at", "differs", "instead", "advice", "late"})


@dataclass(frozen=True, slots=True)
class Module:
    """A module of Fluid.

    `names`: what its own part of `__all__` lists, but for modules; None if it has no `__all__`. `modules`: those of
    its `__all__`.
    """

    path: str
    names: tuple[str, ...] | None = None
    modules: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    stars: tuple[str, ...] = ()
    defines: frozenset[str] = frozenset()
    imports: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    whole: str = ""
    at: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    late: bool = False
    is_released: bool = False
    """Whether it is of the release that fluid.toml is of; others are of releases before."""

    def has(self, name: str) -> bool:
        """Whether the module itself has `name`, other than by an import."""
        listed = self.names or ()
        return name in listed or name in self.more or name in self.defines or name in self.at or name in self.instead

    def gives(self, name: str) -> bool:
        """Whether modules that import all of this one have `name` as well."""
        if self.names is None:
            return not name.startswith("_") or name in self.more
        return name in self.names or name in self.more


def read_modules(folder: Path) -> tuple[str, dict[str, Module]]:
    """Return the release that the names are of, and every module by path, with the packages above them."""
    of_fluid, of_penstock = (
        tomllib.loads((folder / name).read_text(encoding="utf-8")) for name in ("fluid.toml", "names.toml")
    )
    release = of_fluid.pop("release", "")
    modules = {path: _module(path, of_fluid, of_penstock.get(path, {})) for path in sorted({*of_fluid, *of_penstock})}
    for path in list(modules):
        while path := path.rpartition(".")[0]:
            modules.setdefault(path, Module(path))
    return release, modules


def _module(path: str, of_fluid: Mapping[str, Any], penstock: Mapping[str, Any]) -> Module:
    fluid = of_fluid.get(path, {})
    for file, section, known in (("fluid.toml", fluid, _OF_FLUID), ("names.toml", penstock, _OF_PENSTOCK)):
        if not section.keys() <= known:
            raise Bug(f"{file}: [{path}] has {sorted(section.keys() - known)}; expected {sorted(known)}")
    names, modules = _listed(path, of_fluid)
    more, here = (tuple(penstock.get(key, "").split()) for key in ("more", "here"))
    at, differs, instead = (penstock.get(key, {}) for key in ("at", "differs", "instead"))
    return Module(
        path,
        names=names if "all" in fluid else None,
        modules=modules,
        exports=tuple(fluid.get("all_of", "").split()),
        stars=tuple(fluid.get("stars", "").split()),
        defines=frozenset(fluid.get("defines", "").split()),
        imports=_imports(fluid.get("imports", {})),
        more=more,
        here=here,
        whole=penstock.get("whole", ""),
        at=at,
        differs=differs,
        instead=instead,
        advice=penstock.get("advice", ""),
        late=penstock.get("late", False),
        is_released=path in of_fluid,
    )


def _listed(path: str, of_fluid: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that `__all__` of a module lists, and the modules: `fluid.data` is a function, too."""
    fluid = of_fluid.get(path, {})
    others = [of_fluid[star].get("all", "") for star in fluid.get("stars", "").split()]
    values = {*fluid.get("defines", "").split(), *" ".join(others).split()}
    names: list[str] = []
    modules: list[str] = []
    for name in fluid.get("all", "").split():
        (modules if f"{path}.{name}" in of_fluid and name not in values else names).append(name)
    return tuple(names), tuple(modules)


def _imports(groups: Mapping[str, str]) -> dict[str, str]:
    """Return where each imported name comes from: `module = "a b:c"` means `module.a` as a and `module.b` as c."""
    found: dict[str, str] = {}
    for module, words in groups.items():
        for word in words.split():
            name, _, bound = word.partition(":")
            found[bound or name] = f"{module}.{name}"
    return found
