"""Tests that the tables of flaws name are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "SECURITY.md", ROOT / "docs" / "faults.md"]
NAMED = re.compile(r"`(test_\w+)`|`(?:pytest )?(tests/[\w/]+\.py)")


@cache
def defined() -> frozenset[str]:
    """Names of all test functions."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return frozenset(name for source in sources for name in re.findall(r"def (test_\w+)\(", source))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    found = NAMED.findall(page.read_text(encoding="utf-8"))
    assert len(found) > 10
    assert [name for name, _ in found if name and name not in defined()] == []
    assert [path for _, path in found if path and not (ROOT / path).exists()] == []
