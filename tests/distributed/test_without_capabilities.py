"""Trainers of one host where the machine lacks what the ring needs: the same parameters, by another way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.distributed.conftest import Start, differences
from tests.support.capabilities import absent

from penstock.process.group import LoggedGroup, stop, wait_for_an_end

TOLERANCE = 1e-9  # as in test_collective_training.py
WHY = "the trainers exchange by Gloo, since shared memory cannot be used"


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["memfd", "memfd,shared_memory", "other_descriptors", "pidfd"])
def test_parameters_are_the_same_without(trainers: Start, missing: str) -> None:
    first, second = trainers(2, "--wide", 160, "--steps", 4, PENSTOCK_ABSENT=missing)
    (alone,) = trainers(1, "--wide", 160, "--steps", 4)
    assert max(differences(alone.values(), first.values()).values()) <= TOLERANCE
    assert set(differences(first.values(), second.values()).values()) == {0.0}
    assert (first.errors + second.errors).count(WHY) == (missing == "other_descriptors")


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "is_in_place"), [("memfd", False), ("pidfd", True)])
def test_gradients_are_summed_in_place_only_in_a_memfd(trainers: Start, missing: str, is_in_place: bool) -> None:
    ranks = trainers(2, "--wide", 160, "--steps", 4, PENSTOCK_ABSENT=missing)
    assert [rank.end() for rank in ranks] == [0, 0]
    assert [rank.said("in place") > 0 for rank in ranks] == [is_in_place] * 2


@pytest.mark.slow
def test_one_rank_that_cannot_open_memory_moves_all_to_gloo(trainers: Start) -> None:
    told = {"PENSTOCK_ABSENT": "other_descriptors"}
    first, second = trainers(2, "--steps", 3, environ_of={1: told})
    assert set(differences(first.values(), second.values()).values()) == {0.0}
    assert f"{WHY}: rank 1" in first.errors


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_map_a_ring_moves_all_to_gloo(trainers: Start, failing: int) -> None:
    first, second = trainers(2, "--steps", 3, "--rings", 2, own={failing: ["--no-mapping"]})
    assert set(differences(first.values(), second.values()).values()) == {0.0}
    assert f"{WHY}: rank {failing} (" in first.errors
    assert "the memory of a ring cannot be mapped" in first.errors


@pytest.mark.slow
def test_shared_memory_that_was_asked_for_is_not_replaced(trainers: Start) -> None:
    told = {"PENSTOCK_ABSENT": "other_descriptors", "PENSTOCK_COLLECTIVE_TRANSPORT": "shared_memory"}
    ranks = trainers(2, "--steps", 2, **told)
    assert all(rank.end() != 0 for rank in ranks)
    assert "PENSTOCK_COLLECTIVE_TRANSPORT is 'shared_memory', 'gloo' does without" in ranks[0].errors


def test_a_launcher_without_pidfd_sees_an_end(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"]
    with absent("pidfd"):
        group = LoggedGroup(command, env=dict(os.environ), log=tmp_path / "log")
        wait_for_an_end([group], 30.0)
    try:
        assert group.status() == 7
    finally:
        stop([group], 1.0)


def test_a_launcher_without_pidfd_stops_what_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with absent("pidfd"):
        group = LoggedGroup(command, env=dict(os.environ), log=tmp_path / "log")
    stop([group], 30.0)
    assert group.status() == -signal.SIGTERM
