"""Only the newest attempt commits; the latest and the best checkpoints stay."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.io.checkpoints.folders import contents, is_of_step, names, writer

from penstock.errors import SpecError
from penstock.io.checkpoints.fence import Fence, StaleAttempt
from penstock.io.checkpoints.layout import Place, newest_first, place_of, to_remove
from penstock.io.checkpoints.reading import newest
from penstock.io.checkpoints.team import Schedule
from penstock.io.checkpoints.writing import Retention
from penstock.io.saves.manifest import sealed


def job(epoch: int, name: str = "j") -> dict[str, str]:
    """Return what the control plane says."""
    return {"PENSTOCK_JOB_ID": name, "PENSTOCK_EPOCH": str(epoch)}


def test_an_attempt_that_another_has_followed_commits_nothing(tmp_path: Path) -> None:
    old = writer(tmp_path, environ=job(1))
    old.write(contents(1))
    new = writer(tmp_path, environ=job(2))
    with pytest.raises(StaleAttempt, match=r"attempt 1 \(job j, epoch 1\).*attempt 2 \(job j, epoch 2\)"):
        old.write(contents(2))
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 1)
    new.write(contents(3))
    assert [name for name in names(tmp_path) if not name.startswith("checkpoint.")] == []


def test_an_attempt_superseded_while_writing_commits_nothing(tmp_path: Path) -> None:
    for phase in ("values", "ranks", "manifest", "commit"):
        folder = tmp_path / phase
        old = writer(folder)
        old.write(contents(1))

        def is_followed(reached: str, folder: Path = folder, phase: str = phase) -> None:
            if reached == phase:
                writer(folder).write(contents(1))

        old.at_phase = is_followed
        with pytest.raises(StaleAttempt):
            old.write(contents(2))
        found = newest(folder, strict=True, sets_aside=False)
        assert found is not None and (found.record.attempt, found.record.step) == (2, 1)


def test_an_older_epoch_of_the_same_job_cannot_even_begin(tmp_path: Path) -> None:
    Fence(tmp_path, job(5))
    with pytest.raises(StaleAttempt, match=r"job j, epoch 4, may not"):
        Fence(tmp_path, job(4))
    assert Fence(tmp_path, job(5)).claim.number == 1, "started again in its place"
    assert Fence(tmp_path, job(6)).claim.number == 2
    assert Fence(tmp_path, job(1, "another")).claim.number == 3
    assert Fence(tmp_path, {}).claim.number == 4
    assert Fence(tmp_path, {}).claim.number == 5
    with pytest.raises(SpecError, match="PENSTOCK_EPOCH is 'x'"):
        Fence(tmp_path, {**job(1), "PENSTOCK_EPOCH": "x"})


def test_of_two_processes_in_a_place_the_last_claimant_commits(tmp_path: Path) -> None:
    for phase in ("begin", "values", "manifest", "commit"):
        folder = tmp_path / phase
        old = writer(folder, environ=job(1))

        def lives_on(reached: str, folder: Path = folder, phase: str = phase) -> None:
            """Another is started in its place while it writes, writes the same step, and is not disturbed by it."""
            if reached == phase:
                writer(folder, environ=job(1)).write(contents(7))

        old.at_phase = lives_on
        with pytest.raises(StaleAttempt, match=r"attempt 1 \(job j, epoch 1\).* has taken over"):
            old.write(contents(7))
        with pytest.raises(StaleAttempt):
            old.write(contents(8))
        assert names(folder) == [Place(1, 7).name]
        assert is_of_step(newest(folder, strict=True, sets_aside=False), 7)


def test_whoever_was_taken_over_disturbs_nobody_that_clears_up(tmp_path: Path) -> None:
    old = writer(tmp_path)
    old.write(contents(1))
    work = old.begin(2)
    (tmp_path / "removed.checkpoint.000001.000000000000.x").mkdir()
    new = writer(tmp_path)
    assert names(tmp_path) == [Place(1, 1).name]
    assert not work.exists()
    again = old.begin(2)  # it does not know yet
    new.write(contents(3))
    assert again.exists(), "what it writes into is its own, until the next start"
    writer(tmp_path)
    assert names(tmp_path) == [Place(1, 1).name, Place(2, 3).name]


def test_obsolete_files_are_deleted_before_another_attempt(tmp_path: Path) -> None:
    old = writer(tmp_path, Retention(keep=1))
    old.write(contents(1))

    def is_followed(reached: str) -> None:
        if reached == "removed":
            new = writer(tmp_path)  # removes the same files
            new.write(contents(1))

    old.at_phase = is_followed
    old.write(contents(2))
    assert names(tmp_path) == [Place(1, 2).name, Place(2, 1).name]


def test_a_later_attempts_checkpoint_is_newer_whatever_its_step(tmp_path: Path) -> None:
    writer(tmp_path).write(contents(9))
    writer(tmp_path).write(contents(4))
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 4)


def test_names_say_the_place_and_nothing_else_does() -> None:
    place = Place(12, 34)
    assert place_of(place.name) == place
    assert place_of(Place(10**7, 10**13).name) == Place(10**7, 10**13)
    for name in ("unfinished." + place.name, place.name + ".", "checkpoint.1.2", "checkpoint", "values"):
        assert place_of(name) is None
    drawn = [Place(random.Random(i).randrange(9), i) for i in range(50)]
    assert newest_first([place.name for place in drawn]) == sorted(drawn, reverse=True)


def test_the_latest_and_the_best_stay() -> None:
    found = [(Place(1, step), metric) for step, metric in enumerate([3.0, 1.0, None, 2.0, math.nan, 5.0, 4.0])]

    def kept(keep: int, keep_best: int, best: str = "min") -> list[int]:
        gone = to_remove(found, keep=keep, keep_best=keep_best, best=best)  # type: ignore[arg-type]  # one of two words
        return [place.step for place, _ in found if place not in gone]

    assert kept(2, 0) == [5, 6]
    assert kept(2, 2) == [1, 3, 5, 6]
    assert kept(1, 2, "max") == [5, 6]
    assert kept(1, 9) == [0, 1, 3, 5, 6], "without a metric, or without a number, nothing is among the best"
    assert kept(9, 0) == list(range(7))
    assert to_remove([], keep=1, keep_best=1, best="min") == []
    equal = [(Place(1, step), 1.0) for step in range(4)]
    assert to_remove(equal, keep=1, keep_best=2, best="max") == [Place(1, 0), Place(1, 1)]


def test_folders_follow_the_retention(tmp_path: Path) -> None:
    made = writer(tmp_path, Retention(keep=1, keep_best=1, best="max"))
    for step, metric in enumerate([0.2, 0.9, 0.4, 0.1]):
        made.write(contents(step, metric))
    steps = [place.step for name in names(tmp_path) if (place := place_of(name))]
    assert steps == [1, 3]


def test_one_is_due_by_steps_and_by_time() -> None:
    now = 100.0
    schedule = Schedule(3, 10.0, clock=lambda: now)
    assert [step for step in range(8) if schedule.by_steps(step)] == [3, 6]
    assert not schedule.by_time()
    now += 10
    assert schedule.by_time()
    schedule.saved()
    assert not schedule.by_time()
    never = Schedule(None, None)
    assert not never.by_steps(1) and not never.by_time()
    for steps, seconds in ((0, None), (-1, None), (1.5, None), (None, 0.0), (True, None)):
        with pytest.raises(SpecError, match="every_"):
            Schedule(steps, seconds)  # type: ignore[arg-type]  # what a user may pass


def test_a_claim_of_before_there_were_tokens_is_followed(tmp_path: Path) -> None:
    claim = asdict(Fence(tmp_path, job(2)).claim)
    del claim["token"]
    (tmp_path / "attempt.json").write_text(sealed(claim, "penstock-attempt", 1))
    assert Fence(tmp_path, job(3)).claim.number == 2
