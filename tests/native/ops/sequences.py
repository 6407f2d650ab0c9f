"""Pools over ragged sequences by torch, one sequence after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RAGGED = torch.tensor([3, 0, 1, 4])
POOLS = ("sum", "average", "sqrt", "max", "first", "last")


def pooled(rows: Tensor, kind: str, pad: float) -> Tensor:
    """Reduce the rows of each sequence, one by one."""
    reduce: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(0),
        "average": lambda x: x.mean(0),
        "sqrt": lambda x: x.sum(0) / len(x) ** 0.5,
        "max": lambda x: x.amax(0),
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
    }
    parts = rows.split_with_sizes(RAGGED.tolist())
    return torch.stack([reduce[kind](x) if len(x) else torch.full(rows.shape[1:], pad).to(rows) for x in parts])
