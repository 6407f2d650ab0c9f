"""ParallelExecutors by a few words, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.trainers import Trainers
from tests.support.capabilities import pretend_cores


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainers]:
    """Make ParallelExecutors on a machine that seems to have four cores."""
    pretend_cores(monkeypatch, 4)

    def set_environment(name: str, value: Any) -> None:
        monkeypatch.setenv(name, str(value))

    made = Trainers(set_environment)
    yield made
    made.close()
