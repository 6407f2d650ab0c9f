"""Sequences by steps, in the order of a rank table: longest first, so that those that have a step come first.

A table is int64 [n, 2]: the index of each sequence and its length. Source: lod_tensor_to_array_op.cc,
array_to_lod_tensor_op.cc, shrink_rnn_memory_op.cc (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.program.control.arrays import Element, position


def to_steps(array: list[Element], x: Tensor, table: Tensor) -> tuple[()]:
    """Let the array have an element for each step of the sequences of x: rows of those that have it."""
    array[:] = [x.index_select(0, rows) for rows in _places(table, x.shape[0])]
    return ()


def from_steps(array: list[Element], table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of all steps, one sequence after another in the order before the table's, and their lengths."""
    steps = [one for one in array if one is not None]
    total = sum(len(one) for one in steps)
    places = list(_places(table, total))
    found = [len(one) for one in array if one is not None]
    expected = [len(one) for one in places]
    if found != expected or len(steps) != len(array) or not steps:
        raise ValueError(
            f"the array has steps of {found} rows, and {len(array) - len(steps)} positions without a value; the "
            f"sequences of the rank table have steps of {expected}"
        )
    back = torch.argsort(torch.cat(places))
    return torch.cat(steps).index_select(0, back), _lengths(table)


def lasting(x: Tensor, step: Tensor, table: Tensor, levels: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the rows of x, in a table's order, of the sequences that have a step, and the lengths if x has some."""
    count = int((table[:, 1] > position(step)).sum())
    if not levels:
        return (x[:count].clone(),)
    own = levels[0].reshape(-1)[:count]
    return x[: int(own.sum())].clone(), own.reshape(-1, 1).clone()


def _places(table: Tensor, num_rows: int) -> list[Tensor]:
    """The rows of each step, where sequences stand in the order before the table's."""
    lengths, ranked = _lengths(table).reshape(-1), table[:, 1]
    if int(lengths.sum()) != num_rows:
        raise ValueError(f"the rank table has sequences of {lengths.tolist()} rows; there are {num_rows}")
    starts = (lengths.cumsum(0) - lengths)[table[:, 0]]
    return [starts[: int((ranked > t).sum())] + t for t in range(int(ranked[0]) if len(ranked) else 0)]


def _lengths(table: Tensor) -> Tensor:
    """The lengths of sequences in the order before the table's, int64 [n, 1]."""
    return torch.zeros_like(table[:, 1]).index_copy(0, table[:, 0], table[:, 1]).reshape(-1, 1)
