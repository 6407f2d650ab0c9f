"""Rings of the ranks of one host: memory that the first one makes, and the others open through its process.

It is a memfd, or an unlinked file where there is none, so nothing is left behind, however a rank ends. All ranks use
the rings or none does: before any is used, each reports whether it could open and map it, and all read that.
`SharedRings` owns the native side by name; exchanges in a graph find it there.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from penstock.distributed.rendezvous import Rendezvous
from penstock.errors import Unavailable
from penstock.machine.capability import capability
from penstock.machine.shared import open_shared
from penstock.native import ops as _registered  # noqa: F401 - registers the operators

SLOT_BYTES = 64 << 10
"""Of a rank, four times: what it hands over at a time. The slots of all ranks fit into caches; docs/collective.md."""
_HAS = "yes"
_OPS: Any = torch.ops.penstock


class NoSharedMemory(Unavailable):
    """A rank could not make or open the memory of a ring: every rank raises this, with the same text."""


class SharedRings:
    """The rings of a job on one host, `names` of them. Raises NoSharedMemory, on all ranks or on none; Unavailable."""

    kind = "ring"

    def __init__(self, meeting: Rendezvous, label: str) -> None:
        ranks = meeting.ranks
        self.names = [f"{label}.{number}" for number in range(ranks.num_rings)]
        size = int(_OPS.ring_size_bytes(ranks.num_ranks, SLOT_BYTES))
        with ExitStack() as on_failure:
            for name in self.names:
                _open_agreed(meeting, name, size, on_failure)
            on_failure.pop_all()

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


def _open_agreed(meeting: Rendezvous, name: str, size: int, on_failure: ExitStack) -> None:
    """Open a ring, to be closed `on_failure`, and wait until every rank has. Raises NoSharedMemory where one has not.

    Rank 0's descriptor stays open until then, since the others open the memory through it.
    """
    ranks, descriptor, why = meeting.ranks, -1, ""
    try:
        try:
            descriptor = _make(meeting, name, size) if ranks.rank == 0 else _open(meeting, name)
            _OPS.ring_open(name, descriptor, ranks.rank, ranks.num_ranks, SLOT_BYTES)
            on_failure.callback(_OPS.ring_close, name)
        except (OSError, RuntimeError, ValueError) as error:  # the last two are the operator's
            why = f"{ranks.name(ranks.rank)}: {str(error).partition(chr(10))[0]}"
        meeting.store.set(f"open/{name}/{ranks.rank}", why or _HAS)
        meeting.wait_for(f"open/{name}", "has not opened the shared memory")
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    reports = [meeting.store.get(f"open/{name}/{rank}").decode() for rank in range(ranks.num_ranks)]
    refused = [report for report in reports if report != _HAS]
    if refused:
        raise NoSharedMemory(refused[0])


def _make(meeting: Rendezvous, name: str, size: int) -> int:
    """Make the memory and publish its descriptor, or that there is none. Raises OSError."""
    descriptor = -1
    try:
        descriptor = open_shared("penstock-ring", size)
    except OSError as error:
        raise OSError(error.errno, f"{size >> 10} KiB of shared memory cannot be had: {error.strerror}") from error
    finally:
        meeting.store.set(f"memory/{name}", str(descriptor))
    return descriptor


def _open(meeting: Rendezvous, name: str) -> int:
    """Open the memory that rank 0 has made. Raises OSError."""
    meeting.wait_for_key(f"memory/{name}")
    theirs = int(meeting.store.get(f"memory/{name}"))
    if theirs < 0:
        raise OSError(errno.ENOMEM, f"{meeting.ranks.name(0)} has no shared memory")
    found = capability("other_descriptors")
    if not found.present:
        raise OSError(errno.EACCES, f"the descriptors of {meeting.ranks.name(0)} cannot be opened: {found.detail}")
    return os.open(f"/proc/{meeting.present[0].pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
