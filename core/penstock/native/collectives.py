"""Exchange between GPUs of one process: NCCL where it fits, torch's own copies and sums where not.

These are the CUDA kernels of `penstock::all_reduce_`, `reduce_`, `broadcast_` and `fused_broadcast_`. They run on the
current stream of each tensor's device, which the engine has set. NCCL wants dense tensors, one on each of several
devices; anything else (two replicas on one card, a tensor that is a view with gaps) goes the other way. The sum's order
is NCCL's: equal on all devices, but not the order of the replicas, as it is on CPU.
Not proved on a machine with several cards so far (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.native import ops as _registered  # noqa: F401 - the schemas must exist before their kernels

_composed = torch.ops.penstock_composed


def fits_nccl(tensors: Sequence[Tensor]) -> bool:
    """Whether NCCL takes one tensor of each of several devices: on distinct cards, contiguous, of one dtype."""
    cards = {t.device.index for t in tensors}
    return (
        len(tensors) > 1
        and len(cards) == len(tensors)
        and all(t.is_cuda and t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors)
        and torch.cuda.nccl.is_available(tensors)  # type: ignore[no-untyped-call]  # torch ships it without types
    )


def _position(group: Sequence[Tensor], tensor: Tensor) -> int:
    return next(i for i, t in enumerate(group) if t is tensor)


def all_reduce_(tensors: list[Tensor]) -> None:
    """Make every tensor the sum of all."""
    if fits_nccl(tensors):
        torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]  # as above
    else:
        _composed.all_reduce_(tensors)


def reduce_(tensors: list[Tensor], owner: int) -> None:
    """Make tensors[owner] the sum of all."""
    if fits_nccl(tensors):
        torch.cuda.nccl.reduce(tensors, output=tensors[owner], root=owner)
    else:
        _composed.reduce_(tensors, owner)


def broadcast_(destinations: list[Tensor], source: Tensor) -> None:
    """Copy `source` to every destination."""
    group = sorted([source, *destinations], key=lambda t: t.device.index or 0)  # one communicator for every root
    if fits_nccl(group):
        torch.cuda.nccl.broadcast(group, root=_position(group, source))
    else:
        _composed.broadcast_(destinations, source)


def fused_broadcast_(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its destinations (replica by replica, each in the order of the sources)."""
    for position, source in enumerate(sources):
        broadcast_(destinations[position :: len(sources)], source)


_library = torch.library.Library("penstock", "IMPL", "CUDA")  # type: ignore[no-untyped-call]  # as above
for _kernel in (all_reduce_, reduce_, broadcast_, fused_broadcast_):
    _library.impl(_kernel.__name__, _kernel)  # type: ignore[no-untyped-call]  # as above
