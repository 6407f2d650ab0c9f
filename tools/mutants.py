"""Mutation testing: small wrong edits of the product, each of which the tests named beside it have to notice.

`python tools/mutants.py` copies the checkout, checks that the named tests pass there, and then, one mutant of
tools/mutants.toml at a time, makes the edit in the copy, runs the mutant's tests up to the first failure and takes the
edit back. It prints a table and returns 1 if a mutant survived (all its tests passed) or does not apply, 2 if the tests
fail without any mutant. A run past its limit counts as killed. The checkout itself is never written to.

A mutant is found by its text, wherever in the product that is: `old` has to occur in exactly one place of the Python
sources or, with `symbol`, of the functions and classes of that qualified name. So files may move.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

PRODUCT = ("core", "server", "worker")
COPIED = (*PRODUCT, "tests", "tools", "bench", "examples", "alembic", "docs", "web/dist", "web/src")
LIST = Path(__file__).with_suffix(".toml")
RUN_LIMIT_S = 240.0
TEST_LIMIT_S = 60
_NOT_RUN = (4, 5)  # exit statuses of pytest: no such file, no tests
_BY = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)

Outcome = Literal["killed", "SURVIVED", "does not apply"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit. `area`: the part of the product; `tests`: files, or `FILE::FUNCTION`, that have to notice it."""

    name: str
    area: str
    old: str
    new: str
    tests: tuple[str, ...]
    symbol: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant. `detail`: the first test that failed, or why there is no answer."""

    name: str
    area: str
    outcome: Outcome
    detail: str
    seconds: float


class DoesNotApply(Exception):
    """A mutant whose text is not in exactly one place, or whose edit is no Python."""


def load(path: Path = LIST) -> list[Mutant]:
    """Return the mutants of a list, in its order. Raises TypeError for unknown fields."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def locate(root: Path, mutant: Mutant) -> tuple[Path, str]:
    """Return the one file that a mutant edits, and its text with the edit. Raises DoesNotApply."""
    places: list[tuple[Path, str, int]] = []
    for path in sorted(file for folder in PRODUCT for file in (root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if mutant.old in text:
            places += [(path, text, at) for at in _matches(text, mutant)]
    if len(places) != 1:
        where = ", ".join(str(path.relative_to(root)) for path, _, _ in places) or "none"
        raise DoesNotApply(f"its text is in {len(places)} places ({where}); expected one")
    path, text, at = places[0]
    edited = text[:at] + mutant.new + text[at + len(mutant.old) :]
    try:
        ast.parse(edited)
    except SyntaxError as error:
        raise DoesNotApply(f"with it {path.relative_to(root)} is no Python: {error}") from error
    return path, edited


def _matches(text: str, mutant: Mutant) -> Iterator[int]:
    """Yield where `old` begins, in the whole file or in the definitions called `symbol`."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    spans = [(0, len(text))]
    if mutant.symbol:
        found = _definitions(ast.parse(text), mutant.symbol.split("."))
        spans = [(starts[node.lineno - 1], starts[node.end_lineno or node.lineno]) for node in found]
    for begin, end in spans:
        yield from (begin + match.start() for match in re.finditer(re.escape(mutant.old), text[begin:end]))


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(tree: ast.AST, names: Sequence[str]) -> Iterator[_Definition]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Definition) and node.name == names[0]:
            if len(names) == 1:
                yield node
            else:
                yield from _definitions(node, names[1:])


@contextmanager
def applied(root: Path, mutant: Mutant) -> Iterator[None]:
    """Have the edit in the files of `root` within. Raises DoesNotApply."""
    path, edited = locate(root, mutant)
    original = path.read_bytes()
    # Byte code is looked up by second and size of its source, which an edit need not change.
    cached = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(edited, encoding="utf-8")
        cached.unlink(missing_ok=True)
        yield
    finally:
        path.write_bytes(original)
        cached.unlink(missing_ok=True)


def copy_checkout(root: Path, to: Path) -> None:
    """Copy what tests need of a checkout: sources, compiled libraries, settings."""
    skipped = shutil.ignore_patterns("__pycache__", ".*_cache", "node_modules")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=skipped, symlinks=True)
    for file in root.iterdir():
        if file.is_file() and not file.is_symlink():
            shutil.copy2(file, to / file.name)


def run_tests(root: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run test files with the product of `root`; return pytest's exit status, None past the limit, and its output."""
    path = os.pathsep.join(str(root / folder) for folder in PRODUCT)
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no",
        "--hypothesis-seed=0", f"--timeout={TEST_LIMIT_S}", *tests,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:  # no pipe: what tests left running may keep its end open
        process = subprocess.Popen(
            command, cwd=root, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def judge(root: Path, mutant: Mutant, limit_s: float) -> Result:
    """Apply a mutant to `root`, run its tests and take it back."""
    began = time.monotonic()
    try:
        with applied(root, mutant):
            status, output = run_tests(root, mutant.tests, limit_s)
    except DoesNotApply as error:
        return Result(mutant.name, mutant.area, "does not apply", str(error), time.monotonic() - began)
    outcome: Outcome = "SURVIVED" if status == 0 else "killed"
    failed = _BY.search(output)
    if status is None:
        detail = f"past {limit_s:g} s"
    elif status in _NOT_RUN:
        outcome, detail = "does not apply", f"no tests in {', '.join(mutant.tests)}"
    else:
        detail = failed[1].rpartition("/")[2] if failed else f"exit status {status}" if status else ""
    return Result(mutant.name, mutant.area, outcome, detail, time.monotonic() - began)


def line(result: Result) -> str:
    """Return a row of the table."""
    shown = f"{result.area:<10} {result.name:<44} {result.outcome:<14} {result.seconds:6.1f}  {result.detail}"
    return shown.rstrip()


def show(root: Path, mutants: Sequence[Mutant]) -> int:
    """Print which file each mutant edits; return the exit status: 1 if one does not apply."""
    status = 0
    for mutant in mutants:
        try:
            where = str(locate(root, mutant)[0].relative_to(root))
        except DoesNotApply as error:
            where, status = f"does not apply: {error}", 1
        print(f"{mutant.area:<10} {mutant.name:<44} {where}")
    return status


def main(arguments: Sequence[str] | None = None, *, root: Path = Path(), mutants: Sequence[Mutant] = ()) -> int:
    """Judge mutants of the checkout `root`; return the exit status. `mutants`: instead of those of the list."""
    parser = argparse.ArgumentParser(description="Check that tests notice wrong edits of the product.")
    parser.add_argument("--list", action="store_true", help="print the mutants and what each of them edits")
    parser.add_argument("--only", action="append", metavar="NAME", help="judge this mutant or area alone; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file, too")
    parser.add_argument("--limit", type=float, default=RUN_LIMIT_S, metavar="S", help="seconds for a mutant's tests")
    given = parser.parse_args(arguments)
    chosen = [m for m in mutants or load() if not given.only or {m.name, m.area} & set(given.only)]
    if not chosen:
        parser.error(f"no mutant or area is called {' or '.join(given.only)}")
    if given.list:
        return show(root, chosen)
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        copy = Path(folder).resolve()
        copy_checkout(root, copy)
        status, output = run_tests(copy, sorted({test for m in chosen for test in m.tests}), 10 * given.limit)
        if status != 0:
            print(f"the tests fail without any mutant (exit status {status}):\n{output}", file=sys.stderr)
            return 2
        results = []
        for mutant in chosen:
            results.append(judge(copy, mutant, given.limit))
            print(line(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    killed = sum(result.outcome == "killed" for result in results)
    print(f"mutants: {len(results)}, {killed} killed, {len(results) - killed} not")
    return 0 if killed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
