"""What a process imports at its start is not looked at for garbage: neither meanwhile, nor later, nor at its end."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.imports import importing, importing_torch

COUNTED = """
import gc, sys
full = []
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None)
{imports}
imported = len(gc.get_objects())
print(len(full), imported, gc.get_freeze_count(), gc.isenabled())
"""


@pytest.fixture(autouse=True)
def _as_frozen_as_before() -> Iterator[None]:
    yield
    gc.enable()


def counts(imports: str) -> tuple[int, int, int, bool]:
    """Return how many full collections imports cost, which objects are looked at later, and how many are frozen."""
    code = COUNTED.format(imports=imports)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return int(said[0]), int(said[1]), int(said[2]), said[3] == "True"


@pytest.mark.parametrize(
    ("imports", "at_least"),
    [
        ("import penstock.cli", 20_000),
        ("import penstock_worker.__main__", 50_000),
        ("import penstock_server.__main__", 100_000),
        ("import penstock as fluid; fluid.layers", 100_000),
        ("import penstock.paddle_alias; import paddle.fluid as fluid; fluid.layers.fc", 100_000),
    ],
)
def test_starting_collects_nothing_and_freezes_what_is_there(imports: str, at_least: int) -> None:
    full, looked_at, frozen, enabled = counts(imports)
    assert full == 0
    assert 5 * looked_at < at_least < frozen
    assert enabled


def test_an_import_that_fails_freezes_nothing_and_collects_on() -> None:
    before = gc.get_freeze_count()
    made: list[list[int]] = [[] for _ in range(1000)]
    with pytest.raises(ModuleNotFoundError), importing():
        importlib.import_module("penstock.no_such_module")
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before
    assert any(one is made for one in gc.get_objects())


def test_a_caller_that_collects_nothing_is_left_alone() -> None:
    gc.disable()
    before = gc.get_freeze_count()
    made: list[list[int]] = [[] for _ in range(1000)]
    with importing():
        made.append([])
    assert not gc.isenabled()
    assert gc.get_freeze_count() <= before


def test_what_is_made_after_torch_is_never_frozen() -> None:
    assert "torch" in sys.modules
    before = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before
