"""The eager side of `bench ctr`: that it trains what the example trains, and that contenders take fair turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from bench.ctr import Batch, EagerTrainer, Workload, alternate


@dataclass(slots=True)
class Recorded:
    """A contender that writes down when it was called."""

    name: str
    calls: list[str] = field(default_factory=list)

    def run(self, num_steps: int) -> float:
        self.calls.append(self.name)
        return float(len(self.calls) * num_steps)


def test_contenders_warm_up_and_then_lead_in_turns() -> None:
    calls: list[str] = []
    rates = alternate([Recorded("a", calls), Recorded("b", calls)], num_rounds=3, num_steps=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert rates == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


@pytest.fixture
def workload() -> Workload:
    """Two batches whose label is the parity of the first slot's id."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        ids = torch.randint(0, 8, (3, 64), generator=generator)
        batches.append(Batch(ids, torch.randn(64, 4, generator=generator), ids[0] % 2))
    return Workload(batches, (8, 8, 8), num_numeric=4)


def test_eager_learns_and_fetches_its_loss_every_fifty_steps(workload: Workload) -> None:
    trainer = EagerTrainer(workload, seed=0)
    assert trainer.run(150) > 0
    assert len(trainer.losses) == 3
    assert trainer.losses[-1] < 0.01  # guessing gives ln 2 = 0.69


def test_eager_never_makes_a_dense_gradient_of_a_table(workload: Workload) -> None:
    trainer = EagerTrainer(workload, seed=0)
    trainer.run(1)
    for table in trainer.model.tables.parameters():
        assert table.grad is not None and table.grad.is_sparse
