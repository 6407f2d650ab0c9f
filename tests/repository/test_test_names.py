"""Names of tests: at most 60 characters, and unique in their file, where a second definition would hide the first."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 60


@cache
def names_by_file() -> dict[str, list[str]]:
    """Return the names of all test functions and methods, by file."""
    return {
        str(file.relative_to(TESTS)): [
            node.name
            for node in ast.walk(ast.parse(file.read_bytes()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        ]
        for file in TESTS.rglob("test_*.py")
    }


def test_no_name_of_a_test_is_longer_than_the_limit() -> None:
    assert [(file, name) for file, names in names_by_file().items() for name in names if len(name) > LIMIT] == []


def test_no_file_defines_a_test_twice() -> None:
    doubles = {file: [n for n, count in Counter(names).items() if count > 1] for file, names in names_by_file().items()}
    assert {file: names for file, names in doubles.items() if names} == {}
