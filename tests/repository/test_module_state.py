"""The check of module state: it finds each way in which a function keeps something in a module, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tools import module_state

TOOL = Path(module_state.__file__)

CHANGED = [
    "def f():\n    global kept\n    kept = 2",
    "def f():\n    kept[1] = 2",
    "def f():\n    kept.field = 2",
    "def f():\n    del kept[1]",
    "def f():\n    kept[1].append(2)",
    "class C:\n    async def f(self):\n        kept.clear()",
    "def f():\n    kept.clear()\n    return lambda kept: kept",
    "def f():\n    def g():\n        kept.clear()",
    "f = lambda: kept.pop()",
]


@pytest.mark.parametrize("function", CHANGED)
def test_name_that_a_function_changes_is_state(function: str) -> None:
    assert module_state.state_of(ast.parse(f"kept = make()\n{function}")) == {"kept"}


@pytest.mark.parametrize("own", ["kept = []\n    kept.append(1)", "g(kept)", "for kept in ():\n        kept.x = 1"])
def test_name_that_is_read_or_local_is_none(own: str) -> None:
    assert module_state.state_of(ast.parse(f"kept = []\ndef f():\n    {own}")) == set()


def test_name_that_is_bound_in_a_branch_is_state() -> None:
    text = "try:\n    kept = make()\nfinally:\n    pass\ndef f():\n    kept.clear()"
    assert module_state.state_of(ast.parse(text)) == {"kept"}


def test_name_of_an_enclosing_function_is_none() -> None:
    text = "kept = []\ndef f():\n    kept = []\n    def g():\n        kept.clear()"
    assert module_state.state_of(ast.parse(text)) == set()


def test_parameter_of_the_same_name_is_none() -> None:
    assert module_state.state_of(ast.parse("kept = []\ndef f(kept):\n    kept.append(1)")) == set()


@pytest.mark.parametrize(
    "text",
    [
        "@functools.cache\ndef kept(): ...",
        "@lru_cache(maxsize=1)\ndef kept(): ...",
        "class C:\n    @lru_cache\n    def kept(self): ...",
        "kept = threading.local()",
        "kept: ContextVar[int] = ContextVar('kept')",
        "kept = itertools.count()",
    ],
)
def test_caches_counters_and_thread_locals_are_state(text: str) -> None:
    assert module_state.state_of(ast.parse(text)) == {"kept"}


def tree(folder: Path, source: str) -> Path:
    path = folder / "core" / "p" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return folder


def test_object_whose_methods_change_it_is_state(tmp_path: Path) -> None:
    classes = "class Set:\n    def add(self):\n        self.n += 1\n"
    classes += "class Fixed:\n    def __init__(self):\n        self.n = 1\n"
    found = module_state.problems(tree(tmp_path, f"{classes}kept = Set()\nfixed = Fixed()\n"), {})
    assert found == ["core/p/a.py:kept: state of a module; give it to an object with an owner"]


def test_entry_that_nothing_needs_is_found(tmp_path: Path) -> None:
    allowed = {"core/p/a.py:kept": "why", "core/p/a.py:gone": "why"}
    found = module_state.problems(tree(tmp_path, "kept = {}\ndef f():\n    kept[1] = 2\n"), allowed)
    assert found == ["module_state.toml: core/p/a.py:gone holds no state"]


def test_state_without_an_entry_makes_the_command_fail(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), str(tree(tmp_path, "kept = {}\ndef f():\n    kept[1] = 2\n"))]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, "core/p/a.py:kept" in ended.stdout) == (1, True)
