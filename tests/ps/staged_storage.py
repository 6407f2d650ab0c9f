"""A storage over torch tensors whose dense blocks can be staged, of two servers of a job."""

from __future__ import annotations

from typing import Any

from tests.ps.channel_jobs import Job
from tests.ps.torch_storage import TorchStorage
from torch import Tensor

from penstock.ps.storage import Gradient


class StagedStorage(TorchStorage):
    """One whose dense blocks can be staged. `staged`: value and speed of the newest, by block; `taken`: in order."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.staged: dict[str, tuple[Tensor, Tensor]] = {}
        self._slots: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.taken: list[str] = []

    def stage(self, block: str, gradient: Gradient, slot: int = 0) -> Tensor | None:
        if gradient.rows is not None:
            return None
        speed = self.speed[block].mul(0.5).add_(gradient.values)
        value = self.values[block] - speed * (0.1 / (2 + (self.rounds if self.sync else self.steps[block])))
        self.staged[block] = self._slots[block, slot] = (value, speed)
        return value.clone()

    def take_staged(self, block: str, slot: int = 0) -> None:
        self.values[block], self.speed[block] = self._slots[block, slot]
        self.steps[block] += 1
        self.taken.append(block)


def stored(mode: str, capacity: int = 1000) -> list[TorchStorage]:
    return [
        StagedStorage({f"w.block{i}": (w, 4), f"t.block{i}": (t, 2)}, {"ids": (2, capacity)}, sync=mode == "sync")
        for i, (w, t) in enumerate([(3, 4), (2, 5)])
    ]


def taken(job: Job) -> list[list[str]]:
    return [storage.taken for storage in job.storages]  # type: ignore[attr-defined]  # `stored`
