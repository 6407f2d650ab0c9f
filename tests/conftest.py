"""What every test runs under: the settings that users have. A test that needs another one sets it itself."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import penstock  # noqa: F401 before torch, whose threads it keeps from spinning beside those of other processes

# isort: split
import pytest
import torch  # noqa: F401 as it is loaded it sets what is set here after it
from hypothesis import HealthCheck, settings
from tests.support import longest
from tests.support.nursery import Nursery
from tests.support.process_state import no_flags_set, nothing_warned

gc.disable()  # until all tests are collected: that makes objects by the million, and hardly any garbage

# What one process of the tests has compiled, the next one need not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that runs the tests in the background has told them to ignore it, and processes that tests start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest listens to loggers that do not propagate, and while anybody listens to this one torch writes down where it has
# each shape from: a tenth of the time that it takes to record a program.
logging.getLogger("torch.__trace").propagate = True

# A machine that is busy with other things draws and runs examples slowly.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


LONGEST = longest.listed(longest.LIST.read_text(encoding="utf-8"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make test` leaves to `make test-all`."""
    if longest.is_long(_file(item), LONGEST, {mark.name for mark in item.iter_markers()}):
        item.add_marker(pytest.mark.long)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    items.sort(key=lambda item: longest.place(_file(item), LONGEST))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what thousands of collected tests and torch hold out of what every collection of garbage looks at.

    What tests make is looked at less often than by default: that took an eighth of the time of tests within a process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def _flags_and_warnings_of_this_test_alone() -> Iterator[None]:
    """What a test sets by `set_flags` ends with it, and what is logged once in a process is logged in each test."""
    with no_flags_set(), nothing_warned():
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Processes of jobs that do not import torch anew."""
    nursery = Nursery()
    yield nursery
    nursery.close()
