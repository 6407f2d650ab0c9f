"""What every test runs under: nothing that is measured decides what a test computes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests import environment  # noqa: F401 it comes before whatever imports torch
from tests.nursery import Nursery

from penstock.exec import flags

# A shell that runs the tests in the background has told them to ignore it, and processes that tests start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is busy with other things draws and runs examples slowly.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def _flags_of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets by `set_flags` ends with it."""
    monkeypatch.setattr(flags, "_set", {})


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Processes of jobs that do not import torch anew."""
    nursery = Nursery()
    yield nursery
    nursery.close()
