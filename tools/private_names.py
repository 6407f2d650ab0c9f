"""The check that no file but those of `penstock.compat` uses a private or unstable name of another library.

`python tools/private_names.py` prints one line for each use, with what to do; exit status 1 if there was one. With
`--list` it prints what `penstock.compat` holds, and what tests and benchmarks may use (tools/private_names.toml), as
docs/private-names.md. A name is private if a part of it begins with one underscore, and unstable if it lies in a module
of `UNSTABLE`. An attribute of an object whose library is not known counts as Penstock's own only if Penstock defines
the name, no class of torch has it and `penstock.compat` does not take it from a library; on `self`, `cls` and `super()`
the first is enough. Sees what the text shows: a name that is put together at run time is not found. Of C++, names that
match `_CPP` count.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

SOURCES = ("core", "server", "worker", "examples", "tools", "alembic", "hatch_build.py")
MEASURING = ("bench", "tests")  # checked as well; what they define counts as Penstock's own in them alone
COMPAT = Path("core/penstock/compat")
CPP_SOURCES = Path("core/penstock/native/src")
OWN = frozenset(  # flights_data: an example's module, which its folder's scripts import by its bare name
    {"penstock", "penstock_server", "penstock_worker", "tools", "examples", "bench", "tests", "flights_data"}
)
UNSTABLE = (
    "torch.fx.experimental", "torch.multiprocessing.reductions", "torch.distributed.distributed_c10d",
    "uvicorn.protocols",
)  # fmt: skip
TORCH_MODULES = (
    "torch", "torch.nn", "torch.nn.parameter", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data",
    "torch.distributed", "torch.fx", "torch.library", "torch.autograd", "torch.overrides",
)  # fmt: skip
ALLOWED: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""File of tests or benchmarks -> what it uses, as the check prints it ('*': anything) -> why it may."""

TABLES = {"DEFERRED": "name", "PRIVATE_OPERATORS": "operator", "CPP_NAMES": "C++"}

_TELLING = (  # the nodes that define or take names
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Attribute,
    ast.Call, ast.Constant,
)  # fmt: skip
_NAMEDTUPLE = frozenset({"_replace", "_asdict", "_fields", "_make"})  # documented by Python, in spite of the underscore
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_OPERATOR = re.compile(r"(aten|prims|mkldnn|quantized|_c10d_functional)(?:::|\.)(_\w+)(?:\.\w+)?")
_DOTTED = re.compile(r"torch(?:\.\w+)*\._\w+(?:\.\w+)*")
_CPP = re.compile(
    r"\bat::native::\w+|\bc10::impl::\w+|\bat::_\w+|\bat::AutoDispatchBelowADInplaceOrView\b"
    r"|\btorch/csrc/[\w/]+\.h\b|\b(?:aten|mkldnn)::_\w+|\bmkl_serv_\w+"
)

Kind = Literal["name", "operator", "C++"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name that `penstock.compat` holds, and why."""

    name: str
    kind: Kind
    path: Path
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a private name outside of `penstock.compat`, or one name there that is not as it should be."""

    path: Path
    line: int
    what: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class Known:
    """What decides whose a name is: `own` are defined by Penstock, `taken` come from a library by way of compat.

    `torchs` are attributes of torch's classes: of an object that is not `self`, such a name may be torch's.
    """

    own: Set[str] = field(default_factory=frozenset)
    taken: Set[str] = field(default_factory=frozenset)
    operators: Set[str] = field(default_factory=frozenset)
    torchs: Set[str] = field(default_factory=frozenset)


def is_private(name: str) -> bool:
    """Tell whether a name begins with one underscore."""
    return name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))


# ---------------------------------------------------------------- what compat holds


def entries(path: Path) -> list[Entry]:
    """Read the names of a module of compat, each with its reason: its docstring, or its value in a table."""
    body = ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body
    texts = {name: text for node in body for name in _targets(node) if (text := _text(node)) is not None}
    found: list[Entry] = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        for name in _targets(node):
            if name in TABLES:
                found += _table(path, node, TABLES[name], texts)
            elif not is_private(name):
                found.append(Entry(name, "name", path, node.lineno, _reason(node, after)))
    return found


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _text(node: ast.stmt) -> str | None:
    """The value of an assignment of a string."""
    value = node.value if isinstance(node, ast.Assign) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _reason(node: ast.stmt, after: ast.stmt | None) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return _one_line(ast.get_docstring(node) or "")
    follows = after.value if isinstance(after, ast.Expr) else None
    return _one_line(follows.value) if isinstance(follows, ast.Constant) and isinstance(follows.value, str) else ""


def _table(path: Path, node: ast.stmt, kind: str, texts: dict[str, str]) -> Iterator[Entry]:
    table = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        why = value.elts[-1] if isinstance(value, ast.Tuple) else value
        text = texts.get(why.id, "") if isinstance(why, ast.Name) else str(ast.literal_eval(why))
        if isinstance(key, ast.Constant):
            yield Entry(str(key.value), kind, path, key.lineno, _one_line(text))  # type: ignore[arg-type]  # of TABLES


def _one_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


# ---------------------------------------------------------------- what a file has


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a private name of another library: it is one, unless `attribute` or `operator` is found to be known.

    `attribute`: of an object whose library the text does not show; `on_self`: that is `self`, `cls` or `super()`.
    """

    line: int
    name: str
    attribute: str = ""
    on_self: bool = False
    operator: str = ""

    def is_foreign(self, known: Known) -> bool:
        """Whether it is another library's, after all that is known."""
        if self.attribute:
            may_be_foreign = self.attribute in known.taken or self.attribute in known.torchs
            return self.attribute not in known.own or (may_be_foreign and not self.on_self)
        return not self.operator or self.operator not in known.operators


@dataclass(frozen=True, slots=True)
class Names:
    """What one reading of a file finds: the private names that it defines, and those that it may take."""

    defined: frozenset[str]
    candidates: tuple[Candidate, ...]


def read(path: Path, text: str) -> Names:
    """Read one Python file. Raises: SyntaxError if it does not parse."""
    nodes = [node for node in ast.walk(ast.parse(text, filename=str(path))) if isinstance(node, _TELLING)]
    modules = _imported(nodes)
    return Names(defined_names(nodes), tuple(found for node in nodes for found in _candidates(node, modules)))


def defined_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the private names that a module defines: functions, classes, their attributes, module globals."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef | ast.Module):
            found.update(name for inner in node.body for name in _targets(inner))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return frozenset(filter(is_private, found))


def taken_names(tree: ast.AST) -> set[str]:
    """Return the private attributes that a module of compat reaches for."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}


def _is_self(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    return isinstance(called, ast.Name) and called.id in {"self", "cls", "super"}


def _imported(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> dotted name of what was imported."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def _candidates(node: ast.AST, modules: dict[str, str]) -> Iterator[Candidate]:
    """Find what a node itself, not those within it, may take."""
    if isinstance(node, ast.Import):
        yield from (Candidate(node.lineno, alias.name) for alias in node.names if _is_foreign(alias.name))
    elif isinstance(node, ast.ImportFrom) and not node.level:
        wholes = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from (Candidate(node.lineno, whole) for whole in wholes if _is_foreign(whole))
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node.lineno, node.value, node.attr, modules)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
        name = node.args[1] if len(node.args) > 1 else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield from _attribute(node.lineno, node.args[0], name.value, modules)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _text_name(node.lineno, node.value)


def _is_foreign(dotted: str) -> bool:
    """Whether a dotted name is of another library and private or unstable."""
    parts = dotted.split(".")
    if parts[0] in OWN or parts[0] in sys.stdlib_module_names:
        return False
    return any(map(is_private, parts)) or any(f"{dotted}.".startswith(f"{module}.") for module in UNSTABLE)


def _attribute(line: int, base: ast.expr, name: str, modules: dict[str, str]) -> Iterator[Candidate]:
    dotted = _dotted(base, modules)
    if dotted is not None:
        if _is_foreign(f"{dotted}.{name}"):
            yield Candidate(line, f"{dotted}.{name}")
    elif is_private(name) and name not in _NAMEDTUPLE and not name.startswith("_penstock"):
        yield Candidate(line, f"{ast.unparse(base)}.{name}", attribute=name, on_self=_is_self(base))


def _dotted(node: ast.expr, modules: dict[str, str]) -> str | None:
    """The dotted name of an attribute chain that begins with an imported module or name."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    inner = _dotted(node.value, modules) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner is not None and isinstance(node, ast.Attribute) else None


def _text_name(line: int, text: str) -> Iterator[Candidate]:
    """A private operator, or a module of torch's, that a string names."""
    operator = _OPERATOR.fullmatch(text)
    if operator is not None and is_private(operator[2]):
        yield Candidate(line, text, operator=f"{operator[1]}::{operator[2]}")
    elif _DOTTED.fullmatch(text):
        yield Candidate(line, text)


# ---------------------------------------------------------------- uses


def check_text(path: Path, text: str, known: Known) -> list[Use]:
    """Find the uses in one Python file. Raises: SyntaxError if it does not parse."""
    return _uses(path, read(path, text), known)


def _uses(path: Path, names: Names, known: Known) -> list[Use]:
    found = {(one.line, one.name) for one in names.candidates if one.is_foreign(known)}
    return [Use(path, line, _advice(name), name) for line, name in sorted(_longest(found))]


def _longest(found: Iterable[tuple[int, str]]) -> set[tuple[int, str]]:
    """`torch._C` within `torch._C._x` of the same line is one use."""
    uses = set(found)
    return {(line, n) for line, n in uses if not any(line == at and other.startswith(f"{n}.") for at, other in uses)}


def _advice(name: str) -> str:
    return f"{name} is private or unstable: take it from penstock.compat, or add it there with a contract test"


# ---------------------------------------------------------------- C++


def cpp_names(text: str) -> Iterator[tuple[int, str]]:
    """Find (line, name) of the private names in a C++ file; comments count too."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _CPP.finditer(line):
            yield number, match[0]


def check_cpp(texts: dict[Path, str], held: Sequence[Entry]) -> list[Use]:
    """Compare the C++ sources with the table of their private names, in both directions."""
    names = {entry.name for entry in held}
    uses = [(path, line, name) for path, text in texts.items() for line, name in cpp_names(text)]
    advice = f"is private: add it to CPP_NAMES in {COMPAT}/torch.py"
    found = [Use(path, line, f"{name} {advice}") for path, line, name in uses if name not in names]
    stale = [entry for entry in held if entry.name not in {name for _, _, name in uses}]
    return found + [Use(entry.path, entry.line, f"{entry.name} is used by no C++ source: remove it") for entry in stale]


# ---------------------------------------------------------------- the repository


def python_files(root: Path, sources: Sequence[str] = (*SOURCES, *MEASURING)) -> list[Path]:
    """List the Python files that are checked, relative to `root`."""
    found: list[Path] = []
    for source in sources:
        at = root / source
        found += [at] if at.is_file() else sorted(at.rglob("*.py"))
    return [path.relative_to(root) for path in found if "__pycache__" not in path.parts]


def held(root: Path) -> list[Entry]:
    """Read all that compat holds, with paths relative to `root`."""
    found = [
        entry for path in sorted((root / COMPAT).glob("*.py")) if path.stem != "__init__" for entry in entries(path)
    ]
    return [Entry(e.name, e.kind, e.path.relative_to(root), e.line, e.reason) for e in found]


def check(root: Path) -> list[Use]:
    """Check the whole repository."""
    names = held(root)
    operators = {entry.name for entry in names if entry.kind == "operator"}
    sources, measuring = _python_texts(root, SOURCES), _python_names(root, MEASURING)
    compat = {path: text for path, text in sources.items() if path.is_relative_to(COMPAT)}
    others = {path: read(path, text) for path, text in sources.items() if path not in compat}
    stubs = {path: read(path, text) for path, text in _texts(root, Path("core"), ".pyi").items()}
    known = known_names({**others, **stubs}, compat, operators)
    theirs = replace(known, own=known.own | own_names(measuring))
    uses = [use for path, names in others.items() for use in _uses(path, names, known)]
    uses += [use for path, names in measuring.items() for use in _uses(path, names, theirs)]
    found = allowed(uses, {*others, *measuring})
    found += [
        Use(entry.path, entry.line, f"{entry.name} has no reason beside it") for entry in names if not entry.reason
    ]
    return found + check_cpp(cpp_sources(root), [entry for entry in names if entry.kind == "C++"])


def allowed(uses: Sequence[Use], files: Set[Path]) -> list[Use]:
    """Leave out what `ALLOWED` names; add each entry for one of `files` that no use needs."""
    left = [use for use in uses if not {"*", use.name} & set(ALLOWED.get(use.path.as_posix(), {}))]
    seen = {(use.path.as_posix(), name) for use in uses for name in (use.name, "*")}
    stale = [(file, name) for file, names in ALLOWED.items() for name in names if (file, name) not in seen]
    return left + [
        Use(Path(file), 1, f"does not use {name}: remove it from tools/private_names.toml", name)
        for file, name in stale
        if Path(file) in files
    ]


def known_names(others: dict[Path, Names], compat: dict[Path, str], operators: Set[str]) -> Known:
    """Say whose names are, from the files of Penstock, the texts of compat and torch's classes."""
    taken: set[str] = set().union(*(taken_names(ast.parse(text)) for text in compat.values()))
    return Known(own_names(others), taken, operators, torch_attributes())


def own_names(files: dict[Path, Names]) -> set[str]:
    """Return the names that the files define, and those of the modules themselves."""
    return {path.stem for path in files}.union(*(names.defined for names in files.values()))


@cache
def torch_attributes() -> frozenset[str]:
    """Return the private attributes of torch's public classes and of a module, a tensor and an optimizer."""
    torch = importlib.import_module("torch")  # here: `--list` and the tests of one text need none of it
    modules = [importlib.import_module(name) for name in TORCH_MODULES]
    values = [value for module in modules for value in vars(module).values() if issubclass(type(value), type)]
    classes = [value for value in values if value.__module__.partition(".")[0] == "torch"]
    weight = torch.nn.Parameter(torch.empty(1))
    instances = [torch.nn.Module(), weight, torch.optim.SGD([weight]), torch.ops.aten.add, torch.ops.aten.add.Tensor]
    return frozenset(name for item in (*classes, *instances) for name in dir(item) if is_private(name))


def cpp_sources(root: Path) -> dict[Path, str]:
    """Read the C++ sources, by path relative to `root`."""
    return _texts(root, CPP_SOURCES, ".cpp", ".h")


def _python_texts(root: Path, sources: Sequence[str]) -> dict[Path, str]:
    return {path: (root / path).read_text(encoding="utf-8") for path in python_files(root, sources)}


def _python_names(root: Path, sources: Sequence[str]) -> dict[Path, Names]:
    return {path: read(path, text) for path, text in _python_texts(root, sources).items()}


def _texts(root: Path, folder: Path, *suffixes: str) -> dict[Path, str]:
    paths = sorted(path for path in (root / folder).rglob("*") if path.suffix in suffixes)
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}


# ---------------------------------------------------------------- the list

_HEAD = """\
# Private names

The names of other libraries that are private or unstable and that Penstock uses all the same. Python code takes each
from the one module of `penstock.compat` for its library, and a contract test fails with the name when a new version
changes it. `make check` refuses a use anywhere else, except the ones of tests and benchmarks at the end.

Written by `.venv/bin/python tools/private_names.py --list > docs/private-names.md`.
"""
_TITLES: dict[Kind, str] = {
    "name": "## In Python",
    "operator": "## Operators by name",
    "C++": "## In C++\n\nFiles of `core/penstock/native/src`.",
}


def contract_test(entry: Entry) -> str:
    """Return the id of an entry's contract test."""
    library, tests = entry.path.stem, "tests/compat"
    if entry.kind == "operator":
        return f"{tests}/test_{library}_operators.py::test_{library}_keeps_operator[{entry.name}]"
    if entry.kind == "C++":
        return f"{tests}/test_{library}_cpp.py::test_{library}_keeps_cpp[{entry.name}]"
    return f"{tests}/test_{library}_names.py::test_{library}_keeps[{entry.name}]"


def listed(names: Sequence[Entry], cpp: dict[Path, str]) -> str:
    """Return the list as Markdown."""
    parts = [_HEAD]
    for kind, title in _TITLES.items():
        parts += [title, "", "| name | file | why | contract test |", "|---|---|---|---|"]
        parts += [_row(entry, cpp) for entry in names if entry.kind == kind] + [""]
    parts += ["## In tests and benchmarks", "", "| name | file | why |", "|---|---|---|"]
    parts += [f"| `{name}` | `{file}` | {why} |" for file, uses in ALLOWED.items() for name, why in uses.items()]
    parts += [""]
    return "\n".join(parts)


def _row(entry: Entry, cpp: dict[Path, str]) -> str:
    files, test = [entry.path.relative_to(COMPAT)], f"`{contract_test(entry)}`"
    if entry.kind == "C++":
        users = (path for path, text in cpp.items() if entry.name in {name for _, name in cpp_names(text)})
        files = [path.relative_to(CPP_SOURCES) for path in users]
    return f"| `{entry.name}` | {', '.join(f'`{file}`' for file in files)} | {entry.reason} | {test} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the repository, or print the list. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Find private names of other libraries outside of penstock.compat.")
    parser.add_argument("--list", action="store_true", help="print what penstock.compat holds, as Markdown")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    given = parser.parse_args(arguments)
    if given.list:
        print(listed(held(given.root), cpp_sources(given.root)), end="")
        return 0
    uses = check(given.root)
    for use in uses:
        print(use)
    print(f"private names: {len(held(given.root))} in {COMPAT}, {len(uses)} elsewhere or wrong", file=sys.stderr)
    return 1 if uses else 0


if __name__ == "__main__":
    sys.exit(main())
