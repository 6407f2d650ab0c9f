"""The check of import directions: it finds each kind of circle, and imports by a string."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import directions

REPOSITORY = Path(__file__).parents[2]


def tree(root: Path, files: dict[str, str]) -> directions.Tree:
    """Write modules of a package `p` and read their imports."""
    for name, text in files.items():
        path = root / "core/p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for package in path.relative_to(root / "core").parents:
            (root / "core" / package / "__init__.py").touch() if package.name else None
    return directions.read(root)


@pytest.mark.parametrize(
    "back",
    [
        "import p.a",
        "from p import a",
        "from . import a",
        "from p.a import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import name",
        "def later():\n    from p.a import name",
        "import importlib\nimportlib.import_module('p.a')",
        "__import__('p.a')",
        "import importlib\nimportlib.import_module(f'p.a.{1}')",
    ],
)
def test_circle_of_files_is_shown_as_a_path(tmp_path: Path, back: str) -> None:
    found = directions.problems(tree(tmp_path, {"a.py": "import p.b", "b.py": "import p.c", "c.py": back}), {})
    assert found[0].splitlines()[0] == "circle between files: p.a -> p.b -> p.c -> p.a"


def test_circle_of_packages_without_one_of_files(tmp_path: Path) -> None:
    found = directions.problems(
        tree(tmp_path, {"x/low.py": "", "x/high.py": "import p.y.mid", "y/mid.py": "from p.x import low"}), {}
    )
    assert [text.splitlines()[0] for text in found] == ["circle between packages: p.x -> p.y -> p.x"]


def test_one_way_is_no_circle(tmp_path: Path) -> None:
    assert directions.problems(tree(tmp_path, {"a.py": "import p.b", "b.py": "import os"}), {}) == []


def test_import_by_string_is_found_without_a_circle(tmp_path: Path) -> None:
    files = {"a.py": "import importlib\nimportlib.import_module('p.b')", "b.py": ""}
    assert directions.problems(tree(tmp_path, files), {}) == ["core/p/a.py:2: p.a -> p.b: imported by a string"]


def test_allowed_circle_and_string_pass(tmp_path: Path) -> None:
    files = {"a.py": "import importlib\nimportlib.import_module('p.b')", "b.py": "import p.a"}
    allowed = {"strings": {"core/p/a.py": "why"}, "circles": {"p.a -> p.b": "why"}}
    assert directions.problems(tree(tmp_path, files), allowed) == []


def test_allowance_without_need_is_found(tmp_path: Path) -> None:
    allowed = {"strings": {"core/p/a.py": "why"}, "circles": {"p.a -> p.b": "why"}}
    assert len(directions.problems(tree(tmp_path, {"a.py": "import p.b", "b.py": ""}), allowed)) == 2


def test_circle_makes_the_command_fail(tmp_path: Path) -> None:
    tree(tmp_path, {"a.py": "import p.b", "b.py": "import p.a"})
    (tmp_path / "allowed.toml").touch()
    command = [sys.executable, str(REPOSITORY / "tools/directions.py"), str(tmp_path)]
    ended = subprocess.run(
        [*command, "--allowed", str(tmp_path / "allowed.toml")], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, "core/p/b.py:1: p.b -> p.a" in ended.stdout) == (1, True)
