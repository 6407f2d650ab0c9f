"""Trainers of parameter servers go on where each of them was; in this process, with servers on its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.io.checkpoints.folders import names
from tests.io.checkpoints.pserver_threads import Job, Trainer, jobs

from penstock.io.checkpoints.reading import newest
from penstock.io.checkpoints.server_parts import OtherCheckpoint

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


def restart(folder: Path, hidden: str, begin: Begin, **options: Any) -> tuple[Job, Trainer]:
    """Start a job whose servers do not see a checkpoint that its trainer will see."""
    (folder / hidden).rename(folder / "hidden")
    job = begin(folder, **options)
    (folder / "hidden").rename(folder / hidden)
    return job, job.trainer(every_steps=None)


def two_checkpoints(begin: Begin, folder: Path) -> list[str]:
    """Train two steps; return the names of their checkpoints."""
    job = begin(folder)
    trainer = job.trainer(every_steps=1)
    for number in range(2):
        trainer.step(number)
    trainer.ends()
    job.close()
    return names(folder)


def test_trainers_and_servers_with_different_checkpoints_fail(begin: Begin, tmp_path: Path) -> None:
    older, newer = two_checkpoints(begin, tmp_path)
    job, trainer = restart(tmp_path, newer, begin)
    with pytest.raises(OtherCheckpoint, match=f"restores {newer}, but the server {job.endpoints[0]} .*{older}, the"):
        trainer.manager.restore()
    assert trainer.manager.num_steps == 0
    trainer.dies()
    job, trainer = restart(tmp_path, older, begin, restores=False)
    with pytest.raises(OtherCheckpoint, match=f"restores {newer}, but the server .* began from no checkpoint"):
        trainer.manager.restore()
    trainer.dies()
    job = begin(tmp_path)
    for name in (older, newer):
        (tmp_path / name).rename(tmp_path / f"moved.{name}")
    trainer = job.trainer(every_steps=None)
    with pytest.raises(OtherCheckpoint, match=f"restores no checkpoint, but the server .* began from {newer}"):
        trainer.manager.restore()


def test_servers_find_a_checkpoint_that_was_about_to_be_replaced(begin: Begin, tmp_path: Path) -> None:
    older, newer = two_checkpoints(begin, tmp_path)
    (tmp_path / newer).rename(tmp_path / f"replaced.{newer}")
    job = begin(tmp_path)
    assert [server.settings.restored.name for server in job.servers] == [newer, newer]
    trainer = job.trainer(every_steps=None)
    assert told(trainer) == (2, 0, {"trainer": 0, "batch": 2})
    assert names(tmp_path) == [older, newer]


@pytest.mark.parametrize("sync", [True, False])
def test_a_rejoined_trainer_has_the_list_of_ended_ones(
    sync: bool, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_EPOCH", "1")
    job = begin(tmp_path, trainers=2, sync=sync)
    first, second = (job.trainer(index, every_steps=None) for index in range(2))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.step(0), (first, second)))
    second.ends()
    first.step(1)
    saved(first)
    first.dies()
    monkeypatch.setenv("PENSTOCK_EPOCH", "2")
    again = job.trainer(0, every_steps=None)
    assert told(again) == (2, 0, {"trainer": 0, "batch": 2}), "the servers have written what it restores"
    again.step(2)
    saved(again)
    found = newest(tmp_path, strict=True, sets_aside=False)
    assert found is not None
    assert [state.position for state in found.ranks()] == [{"trainer": i, "batch": n} for i, n in enumerate((3, 1))]
    again.dies()
    job.close()

    monkeypatch.setenv("PENSTOCK_EPOCH", "3")
    anew = begin(tmp_path, trainers=2, sync=False)
    alone = anew.trainer(0, every_steps=None)
    assert told(alone) is not None
    saved(alone)
    found = newest(tmp_path, strict=True, sets_aside=False)
    assert found is not None
    assert [state.is_known for state in found.ranks()] == [True, False], "what trainer 1 left was of the run before"
