"""How long torch's idle threads spin: little, unless the environment says how they wait."""

from __future__ import annotations

import os

import pytest

from penstock.openmp import SPINS, limit_spinning


def test_spinning_is_limited_before_torch_is_loaded() -> None:
    environ = {"PATH": "/bin"}
    limit_spinning(environ)
    assert environ == {"PATH": "/bin", "GOMP_SPINCOUNT": SPINS}
    assert "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ, "importing penstock does it"


def test_an_inherited_default_gives_way_to_a_policy() -> None:
    environ = {"GOMP_SPINCOUNT": SPINS, "OMP_WAIT_POLICY": "active"}
    limit_spinning(environ)
    assert environ == {"OMP_WAIT_POLICY": "active"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_environment_decides_how_threads_wait(name: str) -> None:
    environ = {name: "active"}
    limit_spinning(environ)
    assert environ == {name: "active"}
