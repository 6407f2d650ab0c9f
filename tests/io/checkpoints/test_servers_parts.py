"""A checkpoint of a job has a finished part of every server, all of this very save, or there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.io.checkpoints.folders import contents, names, writer
from tests.io.checkpoints.pserver_threads import Job, Trainer, jobs, unfinished

from penstock.errors import PeerError, Unavailable
from penstock.io.checkpoints.reading import newest
from penstock.io.saves.manifest import ServersPart
from penstock.ps.durability.server_snapshots import Cut, ServerSnapshot, SnapshotWriter

Begin = Callable[..., Job]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Make jobs in this process."""
    with jobs({}) as made:
        yield made


def saved(trainer: Trainer) -> None:
    """Save, and wait until it is written."""
    trainer.manager.save()
    trainer.manager.wait()


def part(work: Path, index: int, *, of: int = 2, round: int = 3, mode: str = "sync", said: int | None = None) -> Path:
    """Write a server's part, as it does."""
    path = work / "servers" / "x" / f"{index}-of-{of}"
    path.parent.mkdir(parents=True, exist_ok=True)
    SnapshotWriter(path).finish(Cut("j", index if said is None else said, mode, 0, [], round=round), {})
    return path


def missing(work: Path) -> None:
    """Leave the second server's part out."""


def unready(work: Path) -> None:
    """Begin the second server's part, and leave it so."""
    part(work, 1).rename(work / "servers" / "x" / "unfinished.1-of-2")


def cut_off(work: Path) -> None:
    """Cut a file off."""
    path = part(work, 1) / "000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def of_another(work: Path) -> None:
    """Put the first server's part in the place of the second."""
    part(work, 1, said=0)


def behind(work: Path) -> None:
    """Take the second server's part at another round."""
    part(work, 1, round=2)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (missing, "server 1 of 2 has not finished its part"), (unready, "server 1 of 2 has not finished its part"),
        (cut_off, r"server 1 of 2 .*000000.safetensors is cut off"), (of_another, "was written by server 0"),
        (behind, "server 0 after round 3, server 1 after round 2"),
    ],
)  # fmt: skip
def test_a_checkpoint_lacking_a_servers_part_is_not_committed(
    harm: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    made = writer(tmp_path)
    part(work := made.begin(3), 0)
    harm(work)
    of_job = replace(contents(3), kind="pserver", tensors={}, servers=ServersPart("servers/x", 2))
    with pytest.raises(PeerError, match=said):
        made.write(of_job)
    assert names(tmp_path) == []
    for index in range(2):
        part(made.begin(3) if not index else work, index)
    assert names(made.write(of_job).parent) == ["checkpoint.000001.000000000003"]


def test_parts_of_modes_without_rounds_may_be_of_any(tmp_path: Path) -> None:
    made = writer(tmp_path)
    work = made.begin(3)
    for index in range(2):
        part(work, index, round=index, mode="async")
    made.write(replace(contents(3), kind="pserver", tensors={}, servers=ServersPart("servers/x", 2)))
    assert newest(tmp_path, strict=True, sets_aside=False) is not None


def test_each_save_of_the_same_step_has_copies_of_its_own(begin: Begin, tmp_path: Path) -> None:
    job = begin(tmp_path)
    trainer = job.trainer(every_steps=None)
    trainer.step(0)
    rounds = []
    for _ in range(2):
        saved(trainer)
        found = newest(tmp_path, strict=True, sets_aside=False)
        assert found is not None
        assert found.record.servers is not None
        folder = found.path / found.record.servers.folder
        rounds.append({ServerSnapshot(folder / f"{index}-of-2").cut.round for index in range(2)})
        trainer.manager._steps -= 1  # as a trainer that begins at an older checkpoint comes to the step again
        trainer.step(0)
    assert rounds == [{1}, {2}]


@pytest.mark.parametrize("phase", ["begin", "manifest"])
def test_a_save_failed_by_a_server_is_removed_and_the_next_whole(phase: str, begin: Begin, tmp_path: Path) -> None:
    job = begin(tmp_path)
    trainer = job.trainer(every_steps=None)
    trainer.step(0)

    def full(step: str) -> None:
        if step == phase:
            raise OSError(28, "No space left on device")

    job.servers[1].snapshotter.at_step = full
    with pytest.raises(Unavailable, match=r"the checkpoint of step 1 was not written.*No space left"):
        saved(trainer)
    assert unfinished(tmp_path) == []
    job.servers[1].snapshotter.at_step = lambda step: None
    saved(trainer)
    found = newest(tmp_path, strict=True, sets_aside=False)
    assert found is not None
    assert found.record.step == 1
    trainer.ends()
