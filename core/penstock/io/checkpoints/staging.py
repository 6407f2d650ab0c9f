"""Copies of a training's tensors, which a writer may read while the training goes on.

Memory is kept from one checkpoint to the next, so that only the first one waits for the system to give it: a copy into
new memory is several times slower.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Staging:
    """Not thread-safe; copies are valid until the next `copy`."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies in the processor's memory, by name."""
        before, self._memory = self._memory, {}
        for name, tensor in tensors.items():
            room = before.get(name)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                room = torch.empty(tensor.shape, dtype=tensor.dtype)
            room.copy_(tensor.detach())
            self._memory[name] = room
        return dict(self._memory)
