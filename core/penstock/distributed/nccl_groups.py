"""Exchange of tensors on GPUs by NCCL, one GPU a trainer: `ProcessGroups` over another backend.

Numbers that the processor needs (what a step is, counts of rows) are met through what the trainers have on CPU, shared
memory or Gloo. NCCL's work is enqueued behind the current stream, and no thread waits for it on the processor; `fail`
aborts it, so that a GPU does not wait for a rank that is lost. NCCL's own variables are neither read nor written here.
Has not been run on a GPU so far: docs/gpu.md.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.compat.torch import abort_group
from penstock.distributed.process_groups import ProcessGroups
from penstock.distributed.rendezvous import Rendezvous
from penstock.errors import SpecError, Unavailable

_GPU = torch.device("cuda")


class OnCpu(Protocol):
    """What the trainers have met by."""

    def meet(self, mine: Tensor, ring: int = 0) -> Tensor: ...

    def broadcast(self, tensors: list[Tensor]) -> None: ...


class NcclGroups(ProcessGroups):
    """NCCL groups of the trainers. All make them at once. Raises SpecError without a GPU, Unavailable."""

    def __init__(self, meeting: Rendezvous, label: str, on_cpu: OnCpu) -> None:
        if not torch.cuda.is_available():
            raise SpecError("trainers with GPUs: torch sees no GPU here; use use_cuda=False", got="no GPU")
        self._on_cpu = on_cpu
        super().__init__(meeting, label, "nccl")

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's tensors to every rank, wherever they lie."""
        here = [tensor.cpu() for tensor in tensors]
        self._on_cpu.broadcast(here)
        for tensor, copy in zip(tensors, here, strict=True):
            if tensor is not copy:  # `cpu()` of what lies there already is the tensor itself
                tensor.copy_(copy)

    def fail(self, why: str) -> None:
        """End what waits on a GPU, now and later. Any thread."""
        super().fail(why)
        for group in self.groups():
            abort_group(group, _GPU)

    def _all(self, mine: Tensor, ring: int) -> Tensor:
        return self._on_cpu.meet(mine, ring)

    def _wait(self, work: Any) -> None:
        if self._why:
            raise Unavailable(self._why)
        work.wait()  # the current stream waits
