"""Which cells the version matrix has, what they install, and what of them runs again."""

from __future__ import annotations

import os
import select
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version
from tools import matrix
from tools.matrix import STEPS, Cell, NotPlanned, Outcome

ROOT = Path(__file__).resolve().parents[2]
CELL = Cell("3.12-2.14", "3.12", "2.14")


def passed(*steps: str, key: str = "k") -> list[Outcome]:
    return [Outcome(step, key, True, 1.0, "") for step in steps]


def same_keys(key: str = "k") -> dict[str, str]:
    return dict.fromkeys(STEPS, key)


def test_every_python_meets_the_oldest_and_the_newest_torch() -> None:
    names = [cell.name for cell in matrix.plan(["3.11", "3.9", "3.10"], ("2.10", "2.15"))]
    pairs = [f"{python}-{torch}" for python in ("3.9", "3.10", "3.11") for torch in ("2.10", "2.15")]
    assert names == [*pairs, "lowest"]


def test_the_lowest_cell_has_the_oldest_python_and_no_own_torch() -> None:
    assert matrix.plan(["3.12", "3.11"], ("2.10", "2.15"))[-1] == Cell("lowest", "3.11", "", "lowest-direct")


def test_a_range_of_one_torch_is_one_cell_for_each_python() -> None:
    assert [cell.name for cell in matrix.plan(["3.11"], ("2.13", "2.13"))] == ["3.11-2.13", "lowest"]


def test_the_range_is_that_of_pyproject() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest, newest = matrix.torch_range(next(text for text in dependencies if text.startswith("torch")))
    assert Version(oldest) <= Version("2.13") <= Version(newest)  # what constraints.txt pins


@pytest.mark.parametrize("text", ["torch>=2.10", "torch==2.13.*", "torch>=2.15,<2.15", "torch>=2.10,<3.0"])
def test_a_range_without_a_newest_minor_version_is_refused(text: str) -> None:
    with pytest.raises(NotPlanned, match=r"expected 'torch>=A\.B,<A\.C'"):
        matrix.torch_range(text)


def test_an_unknown_cell_is_refused_with_those_there_are() -> None:
    with pytest.raises(NotPlanned, match=r"no cell 3\.1-9; there are 3\.12-2\.14"):
        matrix.chosen([CELL], ["3.1-9"])


def test_a_cell_installs_its_torch_beside_all_that_is_required() -> None:
    wanted = matrix.requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()), CELL)
    names = {text.split(">")[0] for text in wanted}
    assert {"ninja", "numpy", "uvicorn", "pytest", "torch==2.14.*"} <= names


def test_steps_that_passed_under_the_same_key_are_not_run_again() -> None:
    assert matrix.remaining(same_keys(), passed("environment", "install"), is_kept=True) == ["build", "import", "test"]
    assert matrix.remaining(same_keys(), passed(*STEPS), is_kept=True) == []


def test_a_step_after_one_that_changed_is_run_again() -> None:
    before = [*passed("environment", "install"), *passed("build", key="old"), *passed("import", "test")]
    assert matrix.remaining(same_keys(), before, is_kept=True) == ["build", "import", "test"]


def test_a_failed_step_is_run_again() -> None:
    before = [*passed(*STEPS[:-1]), Outcome("test", "k", False, 1.0, "1 failed")]
    assert matrix.remaining(same_keys(), before, is_kept=True) == ["test"]


def test_a_cell_without_environment_starts_over_unless_it_passed() -> None:
    assert matrix.remaining(same_keys(), passed(*STEPS[:3]), is_kept=False) == list(STEPS)
    assert matrix.remaining(same_keys(), passed(*STEPS), is_kept=False) == []


def test_a_commit_leaves_the_environment_as_it_is() -> None:
    old, new = (matrix.keys(CELL, ["numpy>=2"], revision) for revision in ("a", "b"))
    assert [step for step in STEPS if old[step] == new[step]] == ["environment", "install"]


def test_an_interpreter_without_headers_or_broken_is_skipped(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shim = tmp_path / "bin" / f"python{version}"
    whole = tmp_path / ".pyenv" / "versions" / f"{version}.1" / "bin" / f"python{version}"
    for path, body in ((shim, "exit 127"), (whole, f"echo {version} True")):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    assert matrix.interpreter(version, {"HOME": str(tmp_path), "PATH": str(shim.parent)}) == str(whole)


def ends(pid: int, *, within_s: float) -> bool:
    """Wait for a process that somebody killed: a signal takes its time on a busy machine."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


def test_a_step_over_its_limit_ends_with_what_it_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    script = "exec 9>held; echo here >&9; sleep 600 & wait"  # both hold the pipe open
    with (tmp_path / "log").open("w") as out:
        assert matrix.status_of(["sh", "-c", script], tmp_path, {"PATH": os.environ["PATH"]}, out, 1.0) == -1
    os.set_blocking(reader, True)
    assert os.read(reader, 100) == b"here\n"
    assert os.read(reader, 100) == b""  # the end: none of them is left
    os.close(reader)
    assert "still running after 1 s" in (tmp_path / "log").read_text()


def test_a_machine_without_the_interpreter_has_none(tmp_path: Path) -> None:
    assert matrix.interpreter("3.99", {"HOME": str(tmp_path), "PATH": str(tmp_path)}) is None


@pytest.mark.parametrize("path", matrix.SMOKE)
def test_the_smoke_list_names_what_is_there(path: str) -> None:
    assert (ROOT / path).exists()
