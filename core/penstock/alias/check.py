"""Reads scripts without running them and finds the names of Fluid that they use.

Names are followed through imports and through plain assignments of modules and of names of Fluid
(`layers = fluid.layers`), wherever in a file they stand: scopes of a file are not distinguished. A name that
comes from `import *` counts if the file assigns it nowhere. Attributes of objects are not followed, those of classes
are. Not seen: `getattr`, `importlib` and names in strings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.alias.finder import ROOT
from penstock.alias.names import Name, Standing, Table

_ORDER = (Standing.MISSING, Standing.UNKNOWN, Standing.DIFFERS, Standing.THERE)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a name of Fluid."""

    path: str
    file: Path
    line: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A name of Fluid with its uses."""

    name: Name
    uses: tuple[Use, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        places = [{"file": str(use.file), "line": use.line} for use in self.uses]
        return {"name": self.name.path, "standing": str(self.name.standing), "note": self.name.note, "uses": places}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in some files. `unread`: files that are no Python 3 or cannot be read, with the reason."""

    findings: tuple[Finding, ...]
    files: tuple[Path, ...]
    unread: Mapping[Path, str]

    def count(self, *standings: Standing) -> int:
        """Return the number of names with one of these standings."""
        return sum(found.name.standing in standings for found in self.findings)


def check(path: Path, names: Table) -> Report:
    """Return what the Python files at or below `path` use."""
    files = tuple(sorted(file for file in path.rglob("*.py") if file.is_file())) if path.is_dir() else (path,)
    uses: list[Use] = []
    unread: dict[Path, str] = {}
    for file in files:
        try:
            uses += list(_File(file, ast.parse(file.read_bytes(), str(file)), names).uses())
        except SyntaxError as error:
            unread[file] = f"no Python 3: line {error.lineno}: {error.msg}"
        except OSError as error:
            unread[file] = f"cannot be read: {error.strerror}"
        except (ValueError, RecursionError, MemoryError) as error:  # of the parser: zero bytes, expressions too deep
            unread[file] = f"cannot be parsed: {str(error) or type(error).__name__}"
    return Report(tuple(_findings(uses, names)), files, unread)


def _findings(uses: Iterable[Use], names: Table) -> list[Finding]:
    grouped: dict[str, list[Use]] = {}
    looked_up: dict[str, Name] = {}
    for use in uses:
        found = _name(use.path, names)
        if found is not None:
            looked_up[found.path] = found
            grouped.setdefault(found.path, []).append(use)
    found_all = (Finding(name, tuple(grouped[path])) for path, name in looked_up.items())
    return sorted(found_all, key=lambda found: (_ORDER.index(found.name.standing), found.name.path))


def _name(path: str, names: Table) -> Name | None:
    """Return what a dotted path means; None for a module of Fluid that is there, or of a library."""
    module, name, rest = names.split(path)
    if not name or name.startswith("__"):  # `__version__` and the like: every module has them
        return None
    found = names.look_up(module, name)
    first = rest.partition(".")[0]
    if first and isinstance(found.value, type) and not hasattr(found.value, first):
        return Name(f"{found.path}.{first}", Standing.MISSING, f"{found.value.__name__} has no {first} here")
    if isinstance(found.value, ModuleType):
        return None
    return found


class _File:
    """One file's bindings and uses."""

    def __init__(self, file: Path, tree: ast.Module, names: Table) -> None:
        self._file, self._tree, self._names = file, tree, names
        self._bound: dict[str, str] = {}
        self._stars: list[str] = []
        self._imported: list[Use] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and not node.level and _is_fluid(node.module or ""):
                self._import_from(node)
        self._own = {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._assign(node.targets[0].id, node.value)

    def uses(self) -> Iterator[Use]:
        """Iterate over the uses of Fluid's names, imports included."""
        yield from self._imported
        inner = {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner and isinstance(node.ctx, ast.Load):
                path = self._path(node)
                if path:
                    yield Use(path, self._file, node.lineno)

    def _import(self, node: ast.Import) -> None:
        for alias in filter(lambda alias: _is_fluid(alias.name), node.names):
            self._bound[alias.asname or ROOT] = alias.name if alias.asname else ROOT
            if alias.name not in self._names.modules:
                self._imported.append(Use(alias.name, self._file, node.lineno))

    def _import_from(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self._stars.append(str(node.module))
            else:
                self._bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._imported.append(Use(f"{node.module}.{alias.name}", self._file, node.lineno))

    def _assign(self, name: str, value: ast.expr) -> None:
        path = self._path(value) if isinstance(value, ast.Attribute) else ""
        if path in self._names.modules and name not in self._bound:
            self._bound[name] = path

    def _path(self, node: ast.expr) -> str:
        """Return the dotted path below `paddle` that an expression names; empty for any other."""
        if isinstance(node, ast.Attribute):
            above = self._path(node.value)
            return f"{above}.{node.attr}" if above else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self._bound:
            return self._bound[node.id]
        if node.id not in self._own:
            for module in self._stars:
                if module in self._names.modules and node.id in self._names.public(module):
                    return f"{module}.{node.id}"
        return ""


def _is_fluid(module: str) -> bool:
    return module.partition(".")[0] == ROOT
