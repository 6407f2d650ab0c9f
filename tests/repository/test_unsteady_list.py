"""The list of unsteady tests: each entry names a test, a date and a reason; `make test-all` runs each three times."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "unsteady.txt"


def test_every_entry_names_test_date_and_reason() -> None:
    lines = [line for line in LIST.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in lines:
        test, date, reason = line.split(maxsplit=2)
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), f"{test} does not exist"
        datetime.date.fromisoformat(date)
        assert len(reason) >= 20, f"{test}: say what is unsteady, and why"


def _run(folder: Path, listed: str, *, fails: str, extent: str = "all") -> tuple[int, list[str]]:
    """Run tools/test_all.sh with an interpreter that notes its arguments, and fails if they hold `fails`."""
    (folder / "tests").mkdir()
    (folder / "tests" / "unsteady.txt").write_text(listed)
    (folder / "tests" / "test_costs.py").write_text("pytestmark = pytest.mark.speed\n")
    python = folder / "python"
    script = ["#!/bin/sh", '[ "$1" = -c ] && exec echo 2', f'echo "$*" >>{folder}/calls']
    python.write_text("\n".join([*script, f'case "$*" in *"{fails}"*) exit 1;; esac', ""]))
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "tools" / "test_all.sh", python, extent],
        cwd=folder,
        check=False,
        capture_output=True,
        env={**os.environ},
    )
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_what_fails_once_fails_the_run(tmp_path: Path) -> None:
    status, calls = _run(tmp_path, "# nothing\n", fails="not soak and not speed")
    assert status == 1
    assert len(calls) == 2  # all of them, the costs: nothing a second time


def test_a_short_run_leaves_out_long_unsteady_and_costly(tmp_path: Path) -> None:
    status, calls = _run(tmp_path, "tests/test_a.py::test_b  2026-11-22  waits for\n", fails="never", extent="short")
    assert (status, len(calls)) == (0, 1)
    assert "-m not soak and not speed and not long --deselect=tests/test_a.py::test_b" in calls[0]


def test_a_short_run_that_fails_fails(tmp_path: Path) -> None:
    assert _run(tmp_path, "# nothing\n", fails="not long", extent="short")[0] == 1


def test_an_unsteady_test_runs_three_times(tmp_path: Path) -> None:
    status, calls = _run(tmp_path, "tests/test_a.py::test_b  2026-11-22  waits for\n", fails="never")
    assert status == 0
    assert "--deselect=tests/test_a.py::test_b" in calls[0]
    assert [call.endswith("tests/test_a.py::test_b") for call in calls] == [False, True, True, True, False]


def test_an_unsteady_test_that_fails_fails_the_run(tmp_path: Path) -> None:
    status, _ = _run(
        tmp_path, "tests/test_a.py::test_b  2026-11-22  waits for\n", fails="no:cacheprovider tests/test_a"
    )
    assert status == 1
