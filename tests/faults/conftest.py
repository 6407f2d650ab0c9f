"""Jobs whose processes end with the test, none left behind, and a control plane without any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.control_plane import ControlPlane
from tests.faults.fluid_jobs import Job, Left, Undisturbed
from tests.support.nursery import Nursery

from penstock_server.db import Database, upgrade

UNDISTURBED_STEPS, BRIEF_STEPS = 120, 40


@pytest.fixture
def job(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs. After the test, which fails if any is left that it did not wait for, no process runs."""
    made: list[Job] = []

    def make(**settings: Any) -> Job:
        made.append(Job(nursery, tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    alive = [p.pid for one in made for p in one.processes if p.status is None]
    for one in made:
        one.close()
    assert not alive
    assert nursery.ask(children=True) == []


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a migrated database, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "penstock.db"

    async def make() -> None:
        database = Database(f"sqlite+aiosqlite:///{path}")
        await upgrade(database)
        await database.close()

    asyncio.run(make())
    return path


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A sync job that nothing happens to."""
    return left_alone(Job(nursery, tmp_path_factory.mktemp("undisturbed")), UNDISTURBED_STEPS)


@pytest.fixture(scope="session")
def briefly_undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same for tests in which each step costs much."""
    return left_alone(Job(nursery, tmp_path_factory.mktemp("briefly")), BRIEF_STEPS)


def left_alone(one: Job, steps: int) -> Undisturbed:
    """Run a job, and say what it comes to."""
    began = time.monotonic()
    try:
        one.server()
        trainers = [one.trainer(t, "--steps", steps) for t in (0, 1)]
        one.all_end_well()
        return Undisturbed([t.losses for t in trainers], Left(one), steps, time.monotonic() - began)
    finally:
        one.close()


@pytest.fixture
def plane(migrated: Path) -> Iterator[ControlPlane]:
    """A server on a migrated database with nodes that are played, whose clock the test sets."""
    ControlPlane.template = migrated
    made = ControlPlane()
    made.begin()
    yield made
    made.teardown()
