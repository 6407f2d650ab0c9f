"""The list of the files of tests that take longest: it names files that are there; order and short runs follow it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import longest
from tests.support.longest import When

ROOT = Path(__file__).resolve().parents[2]
TEXT = "# a comment\ntests/test_b.py\n\ntests/test_a.py  always  # why\n"


def test_every_listed_file_is_there_and_listed_once() -> None:
    text = longest.LIST.read_text(encoding="utf-8")
    files = longest.listed(text)
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(files) == len([line for line in text.splitlines() if line and not line.startswith("#")])


def test_listed_files_begin_before_the_others() -> None:
    files = longest.listed(TEXT)
    order = sorted(
        ["tests/test_0.py", "tests/test_a.py", "tests/test_z.py", "tests/test_b.py"],
        key=lambda file: longest.place(file, files),
    )
    assert order == ["tests/test_b.py", "tests/test_a.py", "tests/test_0.py", "tests/test_z.py"]


def test_a_short_run_has_smoke_tests_and_what_always_runs() -> None:
    files = longest.listed(TEXT)
    assert files == {"tests/test_b.py": When.LONG, "tests/test_a.py": When.ALWAYS}
    assert longest.is_long("tests/test_b.py", files, {"asyncio"})
    assert not longest.is_long("tests/test_b.py", files, {"asyncio", "smoke"})
    assert not longest.is_long("tests/test_a.py", files, set())
    assert not longest.is_long("tests/test_0.py", files, set())


def test_another_word_beside_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        longest.listed("tests/test_a.py sometimes")
