"""The size gates of the repository: 256 KiB and 500 lines a file, 60 lines a function, complexity 10.

`python tools/size_gate.py [PATH ...]` looks at the files that git knows or would add, and prints one line for each
that is past its gate, with what to do; exit status 1 if there was one. Complexity of Python is ruff's affair (C901),
functions of TypeScript are biome's (`web/biome.json`). Those of C++ are found by lizard, and their complexity is
counted as ruff does: one for each branch and loop, none for `&&`, `||` and `?:`.
A file with `@generated` in its first five lines is exempt.
A gate is raised here and by an ADR, never by a comment at the place.
"""

from __future__ import annotations

import argparse
import ast
import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lizard

MAX_FILE_BYTES = 256 << 10  # of any kind: packages and data have no place here
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_COMPLEXITY = 10
COMPILED = frozenset({".cpp", ".cc", ".h", ".hpp", ".cu"})
MEASURED = COMPILED | {".py", ".ts", ".tsx", ".css", ".sh"}


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing past its gate, as a line that editors can jump to."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def is_generated(text: str) -> bool:
    """Tell whether one of the first five lines says that a program wrote the file."""
    return any("@generated" in line for line in text.splitlines()[:5])


def check_bytes(path: Path, num_bytes: int) -> list[Violation]:
    """Measure one file of any kind."""
    if num_bytes <= MAX_FILE_BYTES:
        return []
    what = (
        f"{num_bytes >> 10} KiB, at most {MAX_FILE_BYTES >> 10}: make it when it is needed, or take it from a package"
    )
    return [Violation(path, 1, what)]


def check_text(path: Path, text: str) -> list[Violation]:
    """Measure one file. `path` gives the language by its suffix. Raises: SyntaxError if Python does not parse."""
    if path.suffix not in MEASURED or is_generated(text):
        return []
    found = []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(Violation(path, 1, f"{num_lines} lines, at most {MAX_FILE_LINES}: split it by subject"))
    if path.suffix == ".py":
        found.extend(_python_functions(path, text))
    elif path.suffix in COMPILED:
        found.extend(_compiled_functions(path, text))
    return found


def _python_functions(path: Path, text: str) -> Iterator[Violation]:
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _too_long(path, node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)


def _compiled_functions(path: Path, text: str) -> Iterator[Violation]:
    analyzer = lizard.FileAnalyzer([_branches_only, *lizard.get_extensions([])])
    for function in analyzer.analyze_source_code(str(path), text).function_list:
        yield from _too_long(path, function.start_line, function.name, function.end_line - function.start_line + 1)
        if function.cyclomatic_complexity > MAX_COMPLEXITY:
            what = f"{function.name} has complexity {function.cyclomatic_complexity}, at most {MAX_COMPLEXITY}"
            yield Violation(path, function.start_line, f"{what}: use guard clauses, a table or smaller functions")


def _branches_only(tokens: Iterator[str], reader: Any) -> Iterator[str]:
    """Take `&&`, `||` and `?` out of what lizard counts; an extension of lizard sees a file's reader and its tokens."""
    reader.conditions -= reader.logical_operators | reader.ternary_operators
    yield from tokens


def _too_long(path: Path, line: int, name: str, num_lines: int) -> Iterator[Violation]:
    if num_lines > MAX_FUNCTION_LINES:
        what = f"{name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}: take out a part that has a name of its own"
        yield Violation(path, line, what)


def repository_files(root: Path) -> list[Path]:
    """List what git tracks or would add, relative to `root`. Raises: CalledProcessError outside a repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({Path(name) for name in listed.split("\0") if name and (root / name).is_file()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the given files, or all files of the repository. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Check file, function and complexity gates.")
    parser.add_argument("paths", nargs="*", type=Path, help="files to check (default: all files of the repository)")
    paths = parser.parse_args(arguments).paths or repository_files(Path.cwd())
    measured = [path for path in paths if path.suffix in MEASURED]
    violations = [found for path in paths for found in check_bytes(path, path.stat().st_size)]
    violations += [found for path in measured for found in check_text(path, path.read_text(encoding="utf-8"))]
    for violation in violations:
        print(violation)
    print(f"size gates: {len(measured)} files, {len(violations)} past a gate", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    gc.disable()  # trees of nodes by the million, and no garbage
    sys.exit(main())
