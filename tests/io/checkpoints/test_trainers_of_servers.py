"""Trainers of parameter servers go on where each of them was; in this process, with servers on its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.io.checkpoints.pserver_threads import Job, Trainer, jobs

Begin = Callable[..., Job]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Make jobs in this process."""
    with jobs({}) as made:
        yield made


def saved(trainer: Trainer) -> None:
    """Save, and wait until it is written."""
    trainer.manager.save(position=trainer.position)
    trainer.manager.wait()


def told(trainer: Trainer) -> tuple[int, int, object] | None:
    """Restore; return steps, passes, position."""
    found = trainer.manager.restore()
    return None if found is None else (found.step, found.passes, found.position)


def test_trainers_without_common_steps_go_on_each_at_its_own(begin: Begin, tmp_path: Path) -> None:
    job = begin(tmp_path, trainers=2, sync=False)
    first, second = (job.trainer(index, every_steps=None) for index in range(2))
    for number in range(5):
        first.step(number)
    for number in range(2):
        second.step(number)
    first.manager.pass_ended()
    saved(second)
    saved(first)
    first.dies()
    second.dies()
    job.close()
    again = begin(tmp_path, trainers=2, sync=False)
    first, second = (again.trainer(index, every_steps=None) for index in range(2))
    assert told(first) == (5, 1, {"trainer": 0, "batch": 5})
    assert told(second) == (2, 0, {"trainer": 1, "batch": 2})
    assert (first.manager.num_steps, second.manager.num_steps) == (5, 2)
    second.dies()
    first.dies()
    again.close()
    one = begin(tmp_path, trainers=1, sync=False).trainer()
    assert told(one) == (5, 0, None)
