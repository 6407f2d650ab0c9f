"""Ranks with unequal data make passes together, and go on in the middle of one to the bits of an uninterrupted job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.distributed.test_datasets_of_jobs import written
from tests.io.checkpoints.conftest import Start
from tests.io.checkpoints.test_collective_checkpoints import Values, end_well
from tests.support.endpoints import free_endpoints

from penstock.io.checkpoints.layout import Place
from penstock.io.checkpoints.reading import opened

SCRIPT = Path(__file__).with_name("collective_passes_job.py")
pytestmark = [pytest.mark.slow]


def trained(start: Start, folder: Path, checkpoints: Path, begin: int, first_size: int = 40) -> list[Values]:
    """Train from a step to the end, with batches of 4; return the values of both ranks."""
    folder.mkdir()
    written(folder, [first_size, 28])
    endpoints = ",".join(free_endpoints(2))
    ranks = [
        start(SCRIPT, folder, checkpoints, PADDLE_TRAINER_ENDPOINTS=endpoints, PADDLE_TRAINER_ID=str(rank))
        for rank in range(2)
    ]
    values = end_well(ranks, folder)
    assert [rank.output for rank in ranks] == [f"from {begin}\nsteps {max(first_size, 28) // 2}\n"] * 2
    return values


def test_ranks_of_unequal_data_resume_within_a_pass_bit_for_bit(start: Start, tmp_path: Path) -> None:
    whole = trained(start, tmp_path / "whole", tmp_path / "saves", 0)
    places = {step: Place(1, step).name for step in range(3, 20, 3)}
    assert sorted(path.name for path in (tmp_path / "saves").glob("checkpoint.*")) == list(places.values())
    states = {step: opened(tmp_path / "saves" / name).ranks() for step, name in places.items()}
    assert {step: [(one.passes, one.position["samples"]) for one in found] for step, found in states.items()} == {
        3: [(0, 12), (0, 12)],
        6: [(0, 24), (0, 24)],
        9: [(0, 36), (0, 28)],  # rank 1 has no sample left
        12: [(1, 8), (1, 8)],
        15: [(1, 20), (1, 20)],
        18: [(1, 32), (1, 28)],
    }
    for step in (9, 15):
        alone = tmp_path / f"from{step}"
        shutil.copytree(tmp_path / "saves" / places[step], alone / places[step])
        again = trained(start, tmp_path / f"again{step}", alone, step)
        for rank in range(2):
            assert again[rank].keys() == whole[0].keys()
            for name, value in whole[0].items():
                assert again[rank][name].tobytes() == value.tobytes(), f"{name} of rank {rank}, from {step}"


def test_a_rank_without_data_joins_passes_and_their_checkpoints(start: Start, tmp_path: Path) -> None:
    first, second = trained(start, tmp_path / "values", tmp_path / "saves", 0, first_size=0)
    for name, value in first.items():
        assert second[name].tobytes() == value.tobytes(), name
    last = opened(tmp_path / "saves" / Place(1, 12).name)
    assert [(one.passes, one.position["samples"]) for one in last.ranks()] == [(1, 0), (1, 20)]
