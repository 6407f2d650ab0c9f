"""The check that imports go one way: no circle between files or between packages, and no import by a string.

`python tools/directions.py` builds the graph of imports of the sources from their syntax trees. Imports under
`TYPE_CHECKING`, imports inside functions and imports by a literal string (`import_module`, `__import__`; of an f-string
its constant beginning) count like any other. It prints each circle as a path with the lines that make it, and each
import by a string outside `STRINGS`; exit status 1 if there was one. A package is a directory; a module that lies
directly in a root package stands for itself. Circles between packages that are allowed, with the reason, and files that
may import by a string are in tools/directions.toml; an entry that nothing needs fails as well.
Not seen: names that are put together at run time, and the import of a parent package that Python adds to each import.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

SOURCES = ("core", "server", "worker")
ALLOWED = Path(__file__).with_suffix(".toml")
_BY_STRING = frozenset({"import_module", "__import__"})


@dataclass(frozen=True, slots=True)
class Import:
    """One module that a file imports."""

    source: str
    target: str
    path: Path
    line: int
    by_string: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.source} -> {self.target}"


@dataclass(slots=True)
class Tree:
    """The modules under some directories, and the imports between them. `packages`: module -> its directory."""

    packages: dict[str, str] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    strings: list[Import] = field(default_factory=list)


def read(root: Path, sources: Sequence[str] = SOURCES) -> Tree:
    """Return the imports of all Python files under `root`/`sources`. Raises SyntaxError."""
    tree = Tree()
    files: dict[str, Path] = {}
    for source in sources:
        for path in sorted((root / source).rglob("*.py")):
            parts = path.relative_to(root / source).with_suffix("").parts
            package = ".".join(parts[:-1])
            name = package if parts[-1] == "__init__" else ".".join(parts)
            files[name] = path
            tree.packages[name] = package if len(parts) > 2 else name
    for name, path in files.items():
        shown = path.relative_to(root)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target, line, by_string in _targets(ast.parse(path.read_text(encoding="utf-8")), package):
            found = Import(name, _module(target, files), shown, line, by_string)
            if by_string:
                tree.strings.append(Import(name, target, shown, line, by_string))
            if found.target and found.target != name:
                tree.imports.append(found)
    return tree


def _module(target: str, files: Mapping[str, Path]) -> str:
    """Return the module that a dotted name means: the longest known beginning of it."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target


def _targets(tree: ast.Module, package: str) -> Iterator[tuple[str, int, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno, False) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _called(node.func) in _BY_STRING:
            yield _literal(node.args[0]), node.lineno, True


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _literal(value: ast.expr) -> str:
    if isinstance(value, ast.JoinedStr):
        value = value.values[0] if value.values else value
    return value.value.rstrip(".") if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return a shortest circle of each group of nodes that reach each other, beginning and ending at its first name."""
    return [_shortest(group[0], edges, frozenset(group)) for group in _groups(edges) if len(group) > 1]


def _shortest(start: str, edges: Mapping[str, Iterable[str]], within: frozenset[str]) -> list[str]:
    ways = [[start]]
    seen = set[str]()
    for way in ways:  # grows: breadth first
        for target in sorted(edges.get(way[-1], ())):
            if target == start:
                return [*way, start]
            if target in within and target not in seen:
                seen.add(target)
                ways.append([*way, target])
    raise AssertionError(f"{start} is in a circle, and none was found")


def _groups(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components, sorted: nodes that reach each other."""
    reached = {node: _reach(node, edges) for node in edges}
    groups: list[list[str]] = []
    placed = set[str]()
    for node in sorted(edges):
        if node not in placed:
            group = sorted({node, *(n for n in reached[node] if node in reached.get(n, ()))})
            placed.update(group)
            groups.append(group)
    return groups


def _reach(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    seen = set[str]()
    left = [start]
    while left:
        for target in edges.get(left.pop(), ()):
            if target not in seen:
                seen.add(target)
                left.append(target)
    return seen


def edges_of(tree: Tree, packages: Mapping[str, str], without: Iterable[tuple[str, str]] = ()) -> dict[str, set[str]]:
    """Return package -> the packages that its modules import, but for the edges `without`."""
    edges: dict[str, set[str]] = {package: set() for package in packages.values()}
    left_out = set(without)
    for one in tree.imports:
        source, target = packages[one.source], packages[one.target]
        if source != target and (source, target) not in left_out:
            edges[source].add(target)
    return edges


def problems(tree: Tree, allowed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return one text for each circle, import by a string and allowance that nothing needs."""
    found: list[str] = []
    edges = {_edge(text): text for text in allowed.get("circles", {})}
    unused = dict(edges)
    for of, packages in (("files", {name: name for name in tree.packages}), ("packages", tree.packages)):
        found += [_circle(of, way, tree, packages) for way in circles(edges_of(tree, packages, edges))]
        whole = edges_of(tree, packages)
        for source, target in edges:
            if target in whole.get(source, ()) and source in _reach(target, whole):
                unused.pop((source, target), None)
    found += [f"{ALLOWED.name}: {text!r} closes no circle" for text in unused.values()]
    strings = allowed.get("strings", {})
    found += [f"{one}: imported by a string" for one in tree.strings if one.path.as_posix() not in strings]
    used = {one.path.as_posix() for one in tree.strings}
    return found + [f"{ALLOWED.name}: {path} imports nothing by a string" for path in strings if path not in used]


def _edge(text: str) -> tuple[str, str]:
    source, _, target = text.partition(" -> ")
    return source, target


def _circle(of: str, way: Sequence[str], tree: Tree, packages: Mapping[str, str]) -> str:
    lines = [f"circle between {of}: {' -> '.join(way)}"]
    for source, target in pairwise(way):
        made_by = (o for o in tree.imports if (packages[o.source], packages[o.target]) == (source, target))
        lines.append(f"  {next(made_by)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--allowed", type=Path, default=ALLOWED)
    options = parser.parse_args(arguments)
    found = problems(read(options.root), tomllib.loads(options.allowed.read_text(encoding="utf-8")))
    print("\n".join(found) or "imports go one way")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
