"""Trainers with a GPU each: NCCL with one rank where a card is visible, and two of them where there are two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.endpoints import free_endpoint, free_endpoints

from penstock.distributed import collective as _registered  # noqa: F401 - registers the operators
from penstock.distributed.process_groups import NcclGroups
from penstock.distributed.ranks import Ranks
from penstock.distributed.rendezvous import Rendezvous

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parents[1] / "distributed" / "nccl2_job.py"
TOLERANCE = 1e-9  # float64; NCCL adds in an order of its own


class Alone:
    """What one rank has met by."""

    def meet(self, mine: torch.Tensor, ring: int = 0) -> torch.Tensor:
        return mine[None].clone()

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """There is nobody else."""


def test_nccl_with_one_rank_gives_back_what_it_got() -> None:
    meeting = Rendezvous(Ranks(0, 1, free_endpoint()))
    groups = NcclGroups(meeting, "one rank", Alone())
    (ring,) = groups.names
    step = torch.ops.penstock.group_step(torch.tensor([4, 0, 7]), ring)
    assert step.tolist() == [[4, 0, 7]]
    gradients = [torch.randn(1000, device="cuda"), torch.randn(3, 5, device="cuda")]
    before = [g.clone() for g in gradients]
    torch.ops.penstock.group_all_reduce_(gradients, 1, step, True, ring)
    rows, values = torch.arange(5, device="cuda"), torch.randn(5, 2, device="cuda")
    found = torch.ops.penstock.group_gather(rows, values, step, True, ring)
    torch.cuda.synchronize()
    assert all(torch.equal(g, b) for g, b in zip(gradients, before, strict=True))
    assert torch.equal(found[0], rows)
    assert torch.equal(found[1], values)
    groups.close()


def _job(folder: Path, ranks: int) -> list[dict[str, np.ndarray]]:
    """Train on so many cards, one a rank; return what each rank has left."""
    folder.mkdir()
    environ = {**os.environ, "PADDLE_TRAINER_ENDPOINTS": ",".join(free_endpoints(ranks))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), "--cuda"],
            env={**environ, "PADDLE_TRAINER_ID": str(rank), "FLAGS_selected_gpus": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(300) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(ranks)]


@pytest.mark.gpu(cards=2)
def test_two_trainers_with_a_card_each_learn_like_one(tmp_path: Path) -> None:
    (alone,), (first, second) = _job(tmp_path / "one", 1), _job(tmp_path / "two", 2)
    for name, wanted in alone.items():
        assert float(np.abs(wanted - first[name]).max(initial=0)) <= TOLERANCE, name
        assert np.array_equal(first[name], second[name]), name
