"""Split feeds over replicas and merge fetches. Pure functions over tensors.

A batch of b rows on n replicas: min(b, n) shares, as even as possible, the larger ones last
(3 rows on 2 replicas: [0] and [1, 2], as ParallelExecutor.run documents).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.errors import FeedError
from penstock.program.expr import Expr
from penstock.program.program import Program


def share_sizes(rows: int, num_replicas: int) -> list[int]:
    """Return the rows of each active replica; rows >= 1."""
    pieces = min(rows, num_replicas)
    base, extra = divmod(rows, pieces)
    return [base + (i >= pieces - extra) for i in range(pieces)]


def has_batch(program: Program, name: str) -> bool:
    """Whether dimension 0 of a feed is the batch."""
    shape = program.variables[name].shape
    return bool(shape) and isinstance(shape[0], Expr)


def split(program: Program, tensors: Mapping[str, torch.Tensor], num_replicas: int) -> list[dict[str, torch.Tensor]]:
    """Return one dict of views for each active replica. Raises FeedError for an empty batch."""
    rows = {name: t.shape[0] for name, t in tensors.items() if has_batch(program, name)}
    if not rows:
        return [dict(tensors) for _ in range(num_replicas)]
    total = next(iter(rows.values()))
    for name, size in rows.items():
        if size == 0:
            raise FeedError(f"feed {name!r} has no rows; feed at least one", variable=name)
        if size != total:
            first = next(iter(rows))
            raise FeedError(
                f"feeds {first!r} and {name!r} must have the same number of rows, but have {total} and {size}"
            )
    sizes = share_sizes(total, num_replicas)
    shares: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
    for name, tensor in tensors.items():
        parts = tensor.split_with_sizes(sizes) if name in rows else [tensor] * len(sizes)
        for share, part in zip(shares, parts, strict=True):
            share[name] = part
    return shares


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the replicas' values along dimension 0; scalars become one row each. Always a copy."""
    rows = [p.reshape(1) if p.dim() == 0 else p for p in parts]
    return rows[0].clone() if len(rows) == 1 else torch.cat(rows)
