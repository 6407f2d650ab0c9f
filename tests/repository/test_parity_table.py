"""docs/fluid-parity.md names a test for each row of the specification, and every named test is collected."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.nursery import Forked, Nursery

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fluid-parity.md"
ROWS = set(range(1, 104))
_TEST = re.compile(r"tests/[\w/]+\.py::test_\w+")


def table() -> dict[int, list[str]]:
    """Return the tests of each row."""
    rows: dict[int, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].isdecimal():
            assert int(cells[1]) not in rows, line
            assert cells[2], line
            rows[int(cells[1])] = cells[3].split()
    return rows


def test_every_row_is_there_once_with_tests_by_their_full_names() -> None:
    rows = table()
    assert set(rows) == ROWS
    for number, tests in rows.items():
        assert tests, number
        assert all(_TEST.fullmatch(test) for test in tests), (number, tests)


def test_every_named_test_is_collected_by_its_name(nursery: Nursery, tmp_path: Path) -> None:
    named = {test for tests in table().values() for test in tests}
    files = sorted({test.partition("::")[0] for test in named})
    argv = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    collecting = Forked(nursery, tmp_path / "collecting", argv, {}, cwd=ROOT)
    assert collecting.end() == 0, collecting.output + collecting.errors
    collected = {line.partition("[")[0] for line in collecting.output.splitlines() if "::" in line}
    assert named <= collected, sorted(named - collected)
