"""Rings of the ranks of one host: memory that the first one makes, and the others open through its process.

It is a memfd, so nothing is left behind, however a rank ends. `Rings` owns the native side by name; exchanges in a
graph find it there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.distributed.rendezvous import Rendezvous
from penstock.errors import Unavailable
from penstock.native import ops as _registered  # noqa: F401 - registers the operators

SLOT_BYTES = 64 << 10
"""Of a rank, four times: what it hands over at a time. The slots of all ranks fit into caches; docs/collective.md."""
_OPS: Any = torch.ops.penstock


class SharedRings:
    """The rings of a job on one host, `names` of them. Raises Unavailable if the memory cannot be had or opened."""

    kind = "ring"

    def __init__(self, meeting: Rendezvous, label: str) -> None:
        ranks = meeting.ranks
        self.names = [f"{label}.{number}" for number in range(ranks.num_rings)]
        size = int(_OPS.ring_size_bytes(ranks.num_ranks, SLOT_BYTES))
        for name in self.names:
            descriptor = self._make(meeting, name, size) if ranks.rank == 0 else self._open(meeting, name)
            try:
                _OPS.ring_open(name, descriptor, ranks.rank, ranks.num_ranks, SLOT_BYTES)
                meeting.say(f"open/{name}")
                meeting.wait_for(f"open/{name}", "has not opened the shared memory")
            finally:
                os.close(descriptor)  # all have mapped it

    @staticmethod
    def _make(meeting: Rendezvous, name: str, size: int) -> int:
        descriptor = os.memfd_create("penstock-ring", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            raise Unavailable(f"{size >> 10} KiB of shared memory for the exchange cannot be had: {error}") from error
        meeting.store.set(f"memory/{name}", str(descriptor))
        return descriptor

    @staticmethod
    def _open(meeting: Rendezvous, name: str) -> int:
        meeting.wait_for_key(f"memory/{name}")
        path = Path(f"/proc/{meeting.present[0].pid}/fd/{meeting.store.get(f'memory/{name}').decode()}")
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(
                f"the shared memory of {meeting.ranks.name(0)} cannot be opened ({error}); "
                "PENSTOCK_COLLECTIVE_TRANSPORT=gloo does without"
            ) from error

    def meet(self, mine: Tensor, ring: int = 0) -> Tensor:
        """Return what every rank gave, int64[ranks, n]; n is at most 64."""
        return _OPS.ring_meet(mine, self.names[ring])  # type: ignore[no-any-return]

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's tensors to every rank."""
        _OPS.ring_broadcast_(tensors, 0, self.names[0])

    def fail(self, why: str) -> None:
        """End whatever waits in an exchange with this message. Any thread."""
        for name in self.names:
            _OPS.ring_fail(name, why)

    def close(self) -> None:
        """Unmap the memory once nothing uses it."""
        for name in self.names:
            _OPS.ring_close(name)
