"""The list of mutants fits the sources, and the tool says of each whether its tests notice it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tools import mutants
from tools.mutants import DoesNotApply, Mutant

ROOT = Path(__file__).resolve().parents[2]
SUM = Mutant("sum-is-a-difference", "core", "left + right", "left - right", ("tests/test_sums.py",))


@pytest.mark.parametrize("mutant", mutants.load(), ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_its_tests_exist(mutant: Mutant) -> None:
    path, edited = mutants.locate(ROOT, mutant)
    assert edited != path.read_text()
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / file).read_text()


def test_names_of_mutants_are_different() -> None:
    names = [mutant.name for mutant in mutants.load()]
    assert sorted(set(names)) == sorted(names)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout: one module and its test."""
    for folder in (*mutants.PRODUCT, "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "core" / "sums.py").write_text(
        "def add(left, right):\n    return left + right\n\n\nclass Sums:\n    def zero(self):\n        return 0 + 0\n"
    )
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (replace(SUM, old="left * right"), r"in 0 places"),
        (replace(SUM, old="return "), r"in 2 places \(core/sums\.py, core/sums\.py\)"),
        (replace(SUM, new="left +* right"), "is no Python"),
        (replace(SUM, symbol="Sums"), r"in 0 places"),
    ],
    ids=["nowhere", "twice", "no_python", "in_another_symbol"],
)
def test_a_mutant_without_one_place_does_not_apply(checkout: Path, mutant: Mutant, words: str) -> None:
    with pytest.raises(DoesNotApply, match=words):
        mutants.locate(checkout, mutant)


def test_a_symbol_tells_equal_texts_apart(checkout: Path) -> None:
    _, edited = mutants.locate(checkout, replace(SUM, old="return ", new="return -", symbol="Sums.zero"))
    assert "return left + right" in edited and "return -0 + 0" in edited


def test_the_command_tells_killed_from_surviving_mutants(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (checkout / "core" / "sums.py").read_bytes()
    unseen, moved = (
        replace(SUM, name="zero-is-one", old="0 + 0", new="0 + 1"),
        replace(SUM, name="moved", old="a * b"),
    )
    report = checkout / "report.json"
    assert mutants.main(["--json", str(report)], root=checkout, mutants=[SUM, unseen, moved]) == 1
    outcomes = {found["name"]: found["outcome"] for found in json.loads(report.read_text())}
    assert outcomes == {"sum-is-a-difference": "killed", "zero-is-one": "SURVIVED", "moved": "does not apply"}
    assert "mutants: 3, 1 killed, 2 not" in capsys.readouterr().out
    assert (checkout / "core" / "sums.py").read_bytes() == before


def test_the_command_succeeds_when_all_mutants_are_killed(checkout: Path) -> None:
    assert mutants.main(["--only", "core"], root=checkout, mutants=[SUM]) == 0


def test_the_list_names_the_file_of_each_mutant(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list"], root=checkout, mutants=[SUM]) == 0
    assert capsys.readouterr().out.split() == ["core", SUM.name, "core/sums.py"]
    assert mutants.main(["--list"], root=checkout, mutants=[replace(SUM, old="a * b")]) == 1
    assert "does not apply" in capsys.readouterr().out


def test_tests_that_fail_without_a_mutant_kill_none(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "tests" / "test_sums.py").write_text("def test_add():\n    assert False\n")
    assert mutants.main([], root=checkout, mutants=[SUM]) == 2
    assert "fail without any mutant" in capsys.readouterr().err


def test_a_mutant_that_hangs_is_killed(checkout: Path) -> None:
    hangs = replace(SUM, old="return left + right", new="while True:\n        pass")
    result = mutants.judge(checkout, hangs, limit_s=3.0)
    assert (result.outcome, result.detail) == ("killed", "past 3 s")
