"""A server with its own HOME, and what keeps pilots of it; the real command where a test says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Site


@pytest.fixture
def quick_site(tmp_path: Path) -> Iterator[Site]:
    """A site whose server notices a lost node within seconds."""
    made = Site(tmp_path / "home", grace_s=1.0)
    made.environ["PENSTOCK_SERVER_LEASE_TTL_S"] = "2"
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the job of tests/engines/training.py leaves its marks."""
    made = tmp_path / "marks"
    made.mkdir()
    return made
