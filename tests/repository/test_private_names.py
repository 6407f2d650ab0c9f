"""The check of private names finds each way in which a file can use one, and takes Penstock's own for what they are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tools import private_names
from tools.private_names import Entry, Known, Use

ROOT = Path(__file__).resolve().parents[2]
KNOWN = Known(
    own={"_ours", "_shared", "_engine", "_values"},
    taken={"_shared"},
    operators={"aten::_listed"},
    torchs={"_values"},
)


def found(text: str) -> list[str]:
    """Return 'line name' of each use."""
    uses = private_names.check_text(Path("a.py"), text, KNOWN)
    return [f"{use.line} {use.what.split(' is private')[0]}" for use in uses]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._decomp import meta_table", "torch._decomp.meta_table"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        (
            "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
            "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        ),
        ("import uvicorn.protocols.utils as utils", "uvicorn.protocols.utils"),
        ("import torch\nx = torch._C._get()", "torch._C._get"),
        ("import torch as t\nx = t._C", "torch._C"),
        ("from torch import ops\nops.aten._softmax", "torch.ops.aten._softmax"),
        ("import torch\ntorch.distributed.distributed_c10d.x()", "torch.distributed.distributed_c10d.x"),
        ("def f(op): return op._schema", "op._schema"),
        ("def f(op): return op().x._schema", "op().x._schema"),
        ("class A:\n    def f(self): return self._parameters", "self._parameters"),
        ("def f(op): return op._shared", "op._shared"),
        ("def f(tensor): return tensor._values()", "tensor._values"),
        ("def f(x): return getattr(x, '_values')", "x._values"),
        ("def f(op): return getattr(op, '_schema', None)", "op._schema"),
        ("import torch\nsetattr(torch, '_x', 1)", "torch._x"),
        ("NAMES = {'aten._unlisted.default': 1}", "aten._unlisted.default"),
        ("LOGGER = 'torch._subclasses.fake_tensor'", "torch._subclasses.fake_tensor"),
    ],
)
def test_a_use_is_found_by_its_line(text: str, name: str) -> None:
    assert found(text) == [f"{len(text.splitlines())} {name}"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.ops.aten.add.Tensor",
        "from penstock.native._engine import TorchPlan",
        "import os, sys\nos._exit(0)\nsys._getframe()",
        "def f(part): return part._ours",
        "class A:\n    def f(self): return self._shared",
        "class A(B):\n    def f(self): return super()._ours()",
        "class A:\n    def f(self): return self._values",
        "from bench._ring import x\nfrom tests._nursery import y",
        "NAMES = ['aten.__name__.x']",
        "from urllib.parse import urlsplit\nurlsplit('')._replace(scheme='ws')",
        "def f(make): make._penstock_door = True",
        "def f(x): return getattr(x, '_ours')",
        "NAMES = {'aten._listed.default': 1, 'aten::_listed': 2, 'aten.add.Tensor': 3}",
        "'''A module that speaks of torch._C and `op._schema`.'''",
        "def f(x): return x.__class__, x.__dict__",
        "from . import _ours\nfrom ._ours import x",
    ],
)
def test_public_names_and_own_ones_are_no_uses(text: str) -> None:
    assert found(text) == []


def test_names_that_a_module_defines_are_its_own() -> None:
    text = """
_table: dict[str, int] = {}
def _make(): local._given = 1
class A:
    _field: int
    def __init__(self): self._kept = 1
    def _method(self): ...
"""
    assert private_names.defined_names(ast.walk(ast.parse(text))) == {
        "_table",
        "_make",
        "_field",
        "_kept",
        "_method",
    }


def compat(tmp_path: Path, text: str) -> list[Entry]:
    path = tmp_path / "torch.py"
    path.write_text(text)
    return private_names.entries(path)


def test_names_of_compat_come_with_their_reasons(tmp_path: Path) -> None:
    text = """
_WHY = "renamed"
A = torch._A
\"\"\"Why
A.\"\"\"
def b():
    \"\"\"Why b.

    More.\"\"\"
DEFERRED = {"C": (_MODULE, "Why C.")}
PRIVATE_OPERATORS = {"aten::_d": _WHY}
CPP_NAMES = {"at::_e": "Why e."}
"""
    held = {(entry.name, entry.kind, entry.reason) for entry in compat(tmp_path, text)}
    assert held == {
        ("A", "name", "Why A."), ("b", "name", "Why b."), ("C", "name", "Why C."), ("aten::_d", "operator", "renamed"),
        ("at::_e", "C++", "Why e."),
    }  # fmt: skip


def test_a_name_of_compat_without_reason_fails(tmp_path: Path) -> None:
    folder = tmp_path / private_names.COMPAT
    folder.mkdir(parents=True)
    (folder / "torch.py").write_text("import torch\n\nA = torch._A\nB = 1\n")
    where = private_names.COMPAT / "torch.py"
    assert [str(use) for use in private_names.check(tmp_path)] == [
        f"{where}:3: A has no reason beside it", f"{where}:4: B has no reason beside it",
    ]  # fmt: skip


def test_cpp_names_are_compared_with_the_table_both_ways() -> None:
    path, table = Path("a.cpp"), Path("torch.py")
    held = [Entry("at::_held", "C++", table, 1, "why"), Entry("at::_gone", "C++", table, 2, "why")]
    text = "at::_held();\nc10::impl::get(at::add());\n#include <torch/csrc/utils/pybind.h>\n"
    assert [(use.path, use.line, use.what.split()[0]) for use in private_names.check_cpp({path: text}, held)] == [
        (path, 2, "c10::impl::get"), (path, 3, "torch/csrc/utils/pybind.h"), (table, 2, "at::_gone"),
    ]  # fmt: skip


def checked(root: Path, texts: dict[str, str]) -> list[str]:
    """Return 'path:line' of each use in a repository of these files."""
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [f"{use.path}:{use.line}" for use in private_names.check(root)]


@pytest.mark.parametrize("folder", private_names.MEASURING)
def test_tests_and_benchmarks_are_checked_as_well(folder: str, tmp_path: Path) -> None:
    assert checked(tmp_path, {f"{folder}/a.py": "import torch._dynamo\n"}) == [f"{folder}/a.py:1"]


def test_a_name_that_only_tests_define_is_not_of_sources(tmp_path: Path) -> None:
    texts = {"tests/a.py": "def _mine(): ...\ndef f(x): return x._mine\n", "core/b.py": "def f(x): return x._mine\n"}
    assert checked(tmp_path, texts) == ["core/b.py:1"]


def test_an_allowed_name_is_no_use_in_its_own_file_alone(tmp_path: Path) -> None:
    text = "import torch\nx = torch.ops.mkldnn._linear_pointwise\n"
    assert checked(tmp_path, {"bench/peers/matrix_roof.py": text, "bench/a.py": text}) == ["bench/a.py:2"]


def test_an_allowed_name_that_is_not_used_fails(tmp_path: Path) -> None:
    assert checked(tmp_path, {"bench/peers/matrix_roof.py": "x = 1\n"}) == ["bench/peers/matrix_roof.py:1"]


def test_only_tests_and_benchmarks_are_allowed_names() -> None:
    assert {file.partition("/")[0] for file in private_names.ALLOWED} == set(private_names.MEASURING)


@pytest.mark.parametrize("name", ["_values", "_apply", "_parameters", "_version", "_schema", "_zero_grad_profile_name"])
def test_attributes_of_torchs_objects_are_torchs(name: str) -> None:
    assert name in private_names.torch_attributes()


def test_a_use_is_shown_as_editors_jump_to_it() -> None:
    assert str(Use(Path("a.py"), 3, "what")) == "a.py:3: what"


def test_the_command_names_the_place_and_fails(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("\nimport torch._dynamo\n")
    command = [sys.executable, str(ROOT / "tools" / "private_names.py"), "--root", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(" is private")[0]) == (1, "core/a.py:2: torch._dynamo")


def test_the_page_of_private_names_is_the_list() -> None:
    listed = private_names.listed(private_names.held(ROOT), private_names.cpp_sources(ROOT))
    assert (ROOT / "docs" / "private-names.md").read_text(encoding="utf-8") == listed
