"""What becomes of the others when a trainer of a collective job dies, never comes, fails or is another one."""

from __future__ import annotations

import re
import time

import pytest
from tests.distributed.conftest import Start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_in_a_step_is_soon_named_by_all_others(trainers: Start, victim: int) -> None:
    ranks = trainers(3, "--steps", 1_000_000)
    for rank in ranks:
        rank.reaches(3)
    began = time.monotonic()
    ranks[victim].kill()
    for rank in ranks:
        if rank is not ranks[victim]:
            assert rank.end() == 1
            assert f"Unavailable: rank {victim} (127.0.0.1:" in rank.errors
            assert "has ended in the middle of the job" in rank.errors
    assert time.monotonic() - began < 100  # a hang; test_failure_detector.py adds up the waits, to below 10 s


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_hangs_is_named_by_all_others(trainers: Start, victim: int) -> None:
    ranks = trainers(3, "--steps", 1_000_000)
    for rank in ranks:
        rank.reaches(3)
    began = time.monotonic()
    ranks[victim].stop()
    for rank in ranks:
        if rank is not ranks[victim]:
            assert rank.end() == 1
            assert re.search(rf"Unavailable: (no heartbeat from )?rank {victim} \(127\.0\.0\.1:", rank.errors)
    assert time.monotonic() - began < 100  # as above
    ranks[victim].kill()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_started_is_named_after_a_timeout(trainers: Start, missing: int) -> None:
    (alone,) = trainers(2, only=(1 - missing,), PENSTOCK_COLLECTIVE_START_S="3")
    assert alone.end() == 1
    assert f"rank {missing} (127.0.0.1:" in alone.errors
    assert "PENSTOCK_COLLECTIVE_START_S" in alone.errors
    assert "has not arrived within" in alone.errors


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_row_82_a_wrong_interface_is_named_beside_existing_ones(trainers: Start, variable: str) -> None:
    (rank,) = trainers(2, only=(0,), **{variable: "eth77"})
    assert rank.end() == 1
    assert f"{variable} asks for the network interface 'eth77', but this machine" in rank.errors
    assert "lo" in rank.errors.rpartition("has ")[2]


def test_a_rank_that_fails_is_named_with_its_error(trainers: Start) -> None:
    first, second = trainers(2, "--steps", 1_000_000, own={1: ["--fail", "3"]})
    assert (first.end(), second.end()) == (1, 1)
    assert "rank 1" in first.errors
    assert "has failed: ValueError: this rank was told to fail" in first.errors


def test_two_ranks_that_train_different_programs_are_told_so(trainers: Start) -> None:
    ranks = trainers(2, "--steps", 3, own={1: ["--dense"]})
    assert [rank.end() for rank in ranks] == [1, 1]
    assert any("begins a step of another program" in r.errors or "run different programs" in r.errors for r in ranks)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_rank_without_a_single_batch_is_named_and_nobody_hangs(trainers: Start, transport: str) -> None:
    ranks = trainers(2, "--steps", 3, 0, PENSTOCK_COLLECTIVE_TRANSPORT=transport)
    assert [rank.end() for rank in ranks] == [1, 1]
    for rank in ranks:
        assert "has ended without a step of the program that rank 0" in rank.errors


def test_a_rank_that_cannot_continue_without_rows_is_named(trainers: Start) -> None:
    first, second = trainers(2, "--steps", 5, 2, own={1: ["--stuck"]})
    assert [first.end(), second.end()] == [1, 1]
    assert "the job has ended badly: this rank was told not to take part without rows" in second.errors
    assert "rank 1" in first.errors
    assert "has failed: ProgramError" in first.errors
    assert second.steps == 2  # what it has printed is not lost
