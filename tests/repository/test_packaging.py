"""What is promised about versions, targets and wheels holds for the files of the repository."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def direct_requirements(without: frozenset[str] = frozenset()) -> list[Requirement]:
    table = project()
    texts = [*table["build-system"]["requires"], *table["project"]["dependencies"]]
    for name, extra in table["project"]["optional-dependencies"].items():
        texts += [] if name in without else extra
    return [Requirement(text) for text in texts]


def closure() -> set[str]:
    """Every distribution that `make setup-dev` installs, by the metadata of what is installed here."""
    found: set[str] = set()
    waiting = [(requirement, "") for requirement in direct_requirements(without=frozenset({"docs"}))]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in found:
            continue
        found.add(key)
        for text in importlib.metadata.requires(name) or []:
            waiting += [(Requirement(text), wanted) for wanted in ("", *requirement.extras)]
    return {key.partition("[")[0] for key in found}


def test_every_dependency_is_pinned_the_indirect_ones_too() -> None:
    assert closure() - pins().keys() == set()


def test_pins_are_what_is_tested_here() -> None:
    installed = {name: Version(importlib.metadata.version(name)).public for name in closure()}
    assert {name: pins()[name] for name in installed} == installed


def test_pins_satisfy_the_requirements() -> None:
    for requirement in direct_requirements():
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), str(requirement)


def test_build_requirements_hold_what_the_build_imports() -> None:
    code = (
        "import sys; before = set(sys.modules); import penstock.native.build; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    required = {canonicalize_name(Requirement(text).name) for text in project()["build-system"]["requires"]}
    assert {canonicalize_name(name) for name in done.stdout.split()} - required == {"penstock"}


def test_torch_is_pinned_without_a_build_of_it() -> None:
    assert pins()["torch"] == "2.13.0"


def test_constraints_name_no_address_and_no_path() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert re.search(r"://|@|^-|^\s*/", text, flags=re.MULTILINE) is None


def test_help_is_the_default_and_lists_what_people_call() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, check=True, capture_output=True, text=True)
    listed = set(re.findall(r"^  (\S+)", done.stdout, flags=re.MULTILINE))
    assert {"help", "setup", "demo", "check", "test", "bench", "soak", "format", "clean"} <= listed


def test_demo_passes_its_arguments_on() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "demo", "ARGS=--exit-when-done --json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "exec .venv/bin/penstock demo --exit-when-done --json"


def test_continuous_integration_runs_make_test() -> None:
    assert "make test-all" in (ROOT / ".ci" / "run").read_text()


def test_alembic_stays_a_folder_of_scripts() -> None:
    """With an `__init__.py` it would hide the library of the same name."""
    assert not list((ROOT / "alembic").rglob("__init__.py"))


@pytest.mark.parametrize("folder", ["core", "server", "worker", "tests", "bench", "examples", "tools"])
def test_types_are_checked_everywhere(folder: str) -> None:
    assert folder in project()["tool"]["mypy"]["files"]


def test_the_lock_file_of_the_page_lists_every_platform() -> None:
    """`npm ci` refuses a lock file that lacks an optional package, even one for another platform."""
    packages = json.loads((ROOT / "web" / "package-lock.json").read_text())["packages"]
    wanted = {name for package in packages.values() for name in package.get("optionalDependencies", {})}
    locked = {path.rpartition("node_modules/")[2] for path in packages}
    assert wanted - locked == set()
