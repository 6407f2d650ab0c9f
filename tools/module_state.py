"""The check that state has an owner: no module-level name that functions change, but those in tools/module_state.toml.

`python tools/module_state.py` lists each module-level name that a function rebinds with `global`, writes into (`name[k]
=`, `name.field =`, `name.append(…)`) or that is an object whose methods change it, and each function or method with a
cache; exit status 1 if there was one, or an entry without need. Not seen: changes through an alias or a function that
is given the object, by another module, and of attributes of classes.
"""

from __future__ import annotations

import ast
import gc
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

SOURCES = ("core", "server", "worker")
ALLOWED = Path(__file__).with_suffix(".toml")
_CHANGES = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"}
    | {"setdefault", "sort", "update", "difference_update", "rotate", "set"}
)
_STATEFUL = frozenset({"ContextVar", "count", "local"})
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.Lambda | ast.ClassDef


def state_of(tree: ast.Module, stateful: Set[str] = _STATEFUL) -> set[str]:
    """Return the module-level names of a file that hold state. `stateful`: names of classes whose objects do."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    found = {node.name for node in functions if {"cache", "lru_cache"} & {*_decorators(node)}}
    known = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    stateful = stateful - {function.name for function in functions}
    for node in _own(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            known |= names
            if isinstance(node.value, ast.Call) and _last(node.value.func) in stateful:
                found |= names
    return found | (set(_changed(tree, frozenset())) & known)


def _own(scope: ast.AST) -> list[ast.AST]:
    """Return the nodes of a scope, not those of functions and classes within; their heads are among them."""
    found = list(ast.iter_child_nodes(scope))
    for node in found:  # grows
        if not isinstance(node, Scope):
            found.extend(ast.iter_child_nodes(node))
    return found


def _changed(scope: ast.AST, hidden: Set[str]) -> Iterator[str]:
    """Name what the functions within a scope change; `hidden`: names that mean locals there."""
    for node in _own(scope):
        if isinstance(node, ast.ClassDef):
            yield from _changed(node, hidden)
        elif isinstance(node, Scope):
            inside = hidden | _local(node)
            yield from _written(node) - inside
            yield from _changed(node, inside)


def stateful_classes(tree: ast.Module) -> Iterator[str]:
    """Name the classes of which a method, other than the constructor, changes the object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [own for own in node.body if isinstance(own, Function) and own.name != "__init__"]
            if any("self" in _written(own) for own in methods) or "local" in map(_last, node.bases):
                yield node.name


def _decorators(node: Function) -> list[str]:
    return [_last(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]


def _last(name: ast.expr) -> str:
    return name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""


def _root(value: ast.expr) -> str:
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _written(function: ast.AST) -> set[str]:
    found = set[str]()
    for node in _own(function):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            found.add(_root(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            found.add(_root(node.func))
    return found


def _local(function: ast.AST) -> set[str]:
    nodes = _own(function)
    names = {
        n.arg for part in nodes if isinstance(part, ast.arguments) for n in ast.walk(part) if isinstance(n, ast.arg)
    }
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names - {name for n in nodes if isinstance(n, ast.Global) for name in n.names}


def problems(root: Path, allowed: Mapping[str, str]) -> list[str]:
    """Return a text for each state under `root` without an owner, and for each entry that nothing needs."""
    paths = [path for source in SOURCES for path in sorted((root / source).rglob("*.py"))]
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    stateful = _STATEFUL | {name for tree in trees.values() for name in stateful_classes(tree)}
    found = {f"{path}:{name}" for path, tree in trees.items() for name in state_of(tree, stateful)}
    return [
        f"{one}: state of a module; give it to an object with an owner" for one in sorted(found - allowed.keys())
    ] + [f"{ALLOWED.name}: {one} holds no state" for one in sorted(allowed.keys() - found)]


def main(arguments: Sequence[str]) -> int:
    """Check, print what was found, and return the exit status."""
    allowed = tomllib.loads(ALLOWED.read_text(encoding="utf-8"))
    reasons = {f"{path}:{name}": why for path, names in allowed.items() for name, why in names.items()}
    found = problems(Path(arguments[0]) if arguments else Path(__file__).parent.parent, reasons)
    print("\n".join(found) or "state has its owners")
    return 1 if found else 0


if __name__ == "__main__":
    gc.disable()  # trees of nodes by the million, and no garbage
    sys.exit(main(sys.argv[1:]))
