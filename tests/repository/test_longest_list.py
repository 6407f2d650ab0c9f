"""The list of the files of tests that begin first: it names files that are there, and the order follows it."""

from __future__ import annotations

from pathlib import Path

from tests.support import longest

ROOT = Path(__file__).resolve().parents[2]


def test_every_listed_file_is_there_and_listed_once() -> None:
    files = longest.listed(longest.LIST.read_text(encoding="utf-8"))
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(set(files)) == len(files)


def test_listed_files_begin_before_the_others() -> None:
    files = longest.listed("# a comment\ntests/test_b.py  60 s\n\ntests/test_a.py  20 s\n")
    order = sorted(
        ["tests/test_0.py", "tests/test_a.py", "tests/test_z.py", "tests/test_b.py"],
        key=lambda file: longest.place(file, files),
    )
    assert order == ["tests/test_b.py", "tests/test_a.py", "tests/test_0.py", "tests/test_z.py"]
