"""A writer that is killed at any phase leaves the checkpoints before it, or its own as well, and nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.io.checkpoints.folders import contents, is_of_step, kills_itself, names, writer

from penstock.errors import UserError
from penstock.io.checkpoints.reading import newest, opened
from penstock.io.checkpoints.writing import PHASES, Retention

AFTER_THE_COMMIT = {"committed", "removal", "removed"}
PLACES = [(phase, turn) for phase in PHASES for turn in range(2 if phase == "values" else 1)]


def writes(folder: Path, step: int) -> Callable[[Callable[[str], None]], object]:
    """Return what the process does: it claims the folder and writes a checkpoint."""

    def work(at_phase: Callable[[str], None]) -> object:
        made = writer(folder)
        made.at_phase = at_phase
        return made.write(contents(step))

    return work


@pytest.mark.parametrize(("phase", "turn"), [place for place in PLACES if place[0] != "replace"])
def test_a_kill_in_any_phase_leaves_the_previous_or_the_new_one(phase: str, turn: int, tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.write(contents(1))
    first.write(contents(2))
    assert kills_itself(writes(tmp_path, 3), phase, turn)
    expected = 3 if phase in AFTER_THE_COMMIT else 2
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), expected)

    again = writer(tmp_path)  # clears up
    left = names(tmp_path)
    assert all(name.startswith("checkpoint.") for name in left)
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), expected)
    again.write(contents(4))
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 4)
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("phase", ["commit", "replace", "committed", "removal", "removed"])
def test_a_kill_in_replacement_leaves_a_checkpoint_of_the_step(phase: str, tmp_path: Path) -> None:
    in_its_place = {"PENSTOCK_JOB_ID": "j", "PENSTOCK_EPOCH": "3"}
    only = Retention(keep=1)
    writer(tmp_path, only, in_its_place).write(contents(5))

    def work(at_phase: Callable[[str], None]) -> object:
        made = writer(tmp_path, only, in_its_place)
        made.at_phase = at_phase
        return made.write(contents(5))

    assert kills_itself(work, phase)
    writer(tmp_path, only, in_its_place)
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 5)
    assert len(names(tmp_path)) == 1


def test_a_writer_that_fails_in_any_phase_leaves_no_files(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.write(contents(1))

    def fail(phase: str) -> None:
        if phase == "manifest":
            raise OSError(28, "No space left on device")

    made.at_phase = fail
    with pytest.raises(OSError, match="No space left"):
        made.write(contents(2))
    assert len(names(tmp_path)) == 1
    made.at_phase = lambda phase: None
    made.write(contents(3))
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 3)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    path = writer(tmp_path).write(contents(1))
    (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        opened(path)
