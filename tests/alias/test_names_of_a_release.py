"""The names of a release of Fluid are read from its Python files, which do not run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tools import fluid_names

FILES = {
    "__init__.py": "from . import a\nfrom .b import *\n__all__ = a.__all__ + ['b']\n__all__ += ['own']\nown = 1\n",
    "a.py": "import os\nfrom .b import f as g, Kind\n__all__ = ['x', 'Kind', 'y, z']\n_hidden = 1\ny = 2\nx = os\n",
    "b.py": "try:\n    def f(): raise SystemExit\nexcept ImportError:\n    pass\nclass Kind: pass\nf()\n",
    "tests/test_a.py": "never = 1\n",
}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    for name, source in FILES.items():
        file = tmp_path / "paddle" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return tmp_path / "paddle"


def test_each_module_has_its_own_names_and_what_it_imports(release: Path) -> None:
    assert tomllib.loads(fluid_names.text(fluid_names.read(release), "9.9")) == {
        "release": "9.9",
        "paddle": {"all": "b own", "all_of": "paddle.a", "stars": "paddle.b"},
        "paddle.a": {"all": "Kind x", "defines": "y", "imports": {"paddle.b": "Kind f:g"}},
        "paddle.b": {"defines": "Kind f"},
    }


def test_a_part_of_all_that_cannot_be_read_ends_the_tool(release: Path) -> None:
    (release / "b.py").write_text("__all__ = names()\n")
    with pytest.raises(SystemExit, match=r"paddle\.b: cannot read this part of __all__: names\(\)"):
        fluid_names.read(release)


def test_the_table_is_of_the_release_that_the_alias_claims() -> None:
    from penstock.alias.finder import VERSION
    from penstock.alias.names import table

    assert table().release == VERSION
    assert fluid_names.DATA.read_text(encoding="utf-8").startswith("# @generated")
