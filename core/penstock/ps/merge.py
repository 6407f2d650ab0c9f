"""What a merge is: the mean over the members of a round, in the order of trainers. Pure, over torch tensors.

dense    sum in the order given / number of members
rows     concatenated in the order given, values / number of members; a row that several trainers touched is there
         several times, as within one trainer's push: the update sums it
mixed    rows are added into zeros of the block's shape first (a table that some trainers send whole)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.ps.storage import Gradient


def mean(gradients: Sequence[Gradient], num_members: int, shape: torch.Size) -> Gradient:
    """Merge one block's gradients. The first one's values may be written to, and may be what is returned."""
    if all(g.rows is not None for g in gradients):
        return _mean_of_rows(gradients, num_members)
    dense = [g.values if g.rows is None else _spread_out(g, shape) for g in gradients]
    total: torch.Tensor = dense[0]
    for one in dense[1:]:
        total.add_(one)
    return Gradient(total.div_(num_members) if num_members > 1 else total)


def _mean_of_rows(gradients: Sequence[Gradient], num_members: int) -> Gradient:
    if len(gradients) == 1:
        (only,) = gradients
        return Gradient(only.values.div_(num_members) if num_members > 1 else only.values, only.rows)
    rows = torch.cat([g.rows for g in gradients if g.rows is not None])
    return Gradient(torch.cat([g.values for g in gradients]).div_(num_members), rows)


def _spread_out(gradient: Gradient, shape: torch.Size) -> torch.Tensor:
    rows: torch.Tensor | None = gradient.rows
    assert rows is not None
    return torch.zeros(shape, dtype=gradient.values.dtype).index_add_(0, rows, gradient.values)
