"""Names of packages: none is hidden by a module, whichever is imported last."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path
    for top in ("core/penstock", "server/penstock_server", "worker/penstock_worker")
    for path in (ROOT / top).rglob("__init__.py")
)


def modules_of(package: Path) -> set[str]:
    beside = package.parent
    return {path.stem for path in beside.glob("*.py")} | {path.parent.name for path in beside.glob("*/__init__.py")}


def imported_by(text: str, package: str) -> set[str]:
    """Return what a package imports from its own modules, but for what a module of the same name has: that is first."""
    return {
        name.asname or name.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}.")
        for name in node.names
        if node.module != f"{package}.{name.name}"
    }


@pytest.mark.parametrize("path", PACKAGES, ids=[str(path.parent.relative_to(ROOT)) for path in PACKAGES])
def test_no_module_takes_the_name_of_what_a_package_has(path: Path) -> None:
    """`package.name` would become the module with its first import, at whatever time that is."""
    package = ".".join(path.parent.relative_to(ROOT).parts[1:])
    assert not imported_by(path.read_text(encoding="utf-8"), package) & modules_of(path)


def test_such_a_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "part.py").touch()
    (tmp_path / "__init__.py").write_text("from top.process import part\n")
    found = imported_by((tmp_path / "__init__.py").read_text(), "top")
    assert found & modules_of(tmp_path / "__init__.py") == {"part"}
