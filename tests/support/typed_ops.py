"""Typed calls of Penstock's own operators, `torch.ops.penstock.*`. docs/operators.md says what each computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from penstock.native import ops as _registered  # noqa: F401 - registers the operators

_OPS = torch.ops.penstock


def lookup_table(table: Tensor, ids: Tensor, padding_idx: int = -1) -> Tensor:
    """Gather the rows of `table` [rows, d] that `ids` int64[...] name: [..., d]; rows of `padding_idx` are zero.

    No derivative: its gradient is (ids, gradient of the result), a SelectedRows.  Raises: IndexError for an id that
    the table does not have.
    """
    return cast(Tensor, _OPS.lookup_table(table, ids, padding_idx))


def sparse_sgd_(param: Tensor, rows: Tensor, values: Tensor, lr: Tensor) -> None:
    """Subtract lr * values [n, d] from the rows int64[n] of `param`; duplicates add up, in order."""
    _OPS.sparse_sgd_(param, rows, values, lr)


def sparse_adam_(
    param: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    step: Tensor,
    rows: Tensor,
    values: Tensor,
    lr: Tensor,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """Update the touched rows as torch.optim.SparseAdam does; `step` counts this step already."""
    _OPS.sparse_adam_(param, moment1, moment2, step, rows, values, lr, beta1, beta2, epsilon)


def sparse_adagrad_(param: Tensor, moment: Tensor, rows: Tensor, values: Tensor, lr: Tensor, *, epsilon: float) -> None:
    """Update the touched rows as torch.optim.Adagrad (without decay) does, duplicates summed first."""
    _OPS.sparse_adagrad_(param, moment, rows, values, lr, epsilon)


def sgd_(param: Tensor, grad: Tensor, lr: Tensor) -> None:
    """Subtract lr * grad."""
    _OPS.sgd_(param, grad, lr)


def adam_(
    param: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    step: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float = 0.0,
) -> None:
    """Update in one pass as torch.optim.Adam does; `step` counts this step already."""
    _OPS.adam_(param, moment1, moment2, step, grad, lr, beta1, beta2, epsilon, weight_decay)


def all_reduce_(tensors: Sequence[Tensor]) -> None:
    """Make every tensor the sum of all, added in list order: the same bits in each."""
    _OPS.all_reduce_(list(tensors))


def reduce_(tensors: Sequence[Tensor], owner: int) -> None:
    """Make tensors[owner] the sum of all, added in list order whoever owns it; the others keep their values."""
    _OPS.reduce_(list(tensors), owner)


def broadcast_(destinations: Sequence[Tensor], source: Tensor) -> None:
    """Copy `source` to every destination; one that is the same memory is left as it is."""
    _OPS.broadcast_(list(destinations), source)


def dropout(
    x: Tensor, rng: Tensor, p: float, *, training: bool, op_seed: int, batch_dim: int = 0, rows_per_sample: int = 1
) -> tuple[Tensor, Tensor]:
    """Zero elements with probability `p` and scale the rest by 1 / (1 - p); returns (y, keep mask).

    `rng` int64[3] is (program seed, step, first global row of this replica): the bits are a function of these,
    `op_seed` and the element's position in the whole batch.  Not training: (copy of x, empty mask).
    """
    return cast(tuple[Tensor, Tensor], _OPS.dropout(x, rng, p, training, op_seed, batch_dim, rows_per_sample))


def dropout_backward(grad: Tensor, mask: Tensor, p: float, *, training: bool) -> Tensor:
    """Pass the gradient on where the mask kept the element, scaled as the forward was."""
    return cast(Tensor, _OPS.dropout_backward(grad, mask, p, training))


def normal(size: Sequence[int], mean: float, std: float, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from N(mean, std); element i depends on (seed, i) only, on every machine."""
    return cast(Tensor, _OPS.normal(size, mean, std, seed, dtype))


def truncated_normal(
    size: Sequence[int], mean: float, std: float, *, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw from N(mean, std) cut off at two standard deviations; seeded as `normal`."""
    return cast(Tensor, _OPS.truncated_normal(size, mean, std, seed, dtype))


def uniform(size: Sequence[int], low: float, high: float, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from [low, high); seeded as `normal`."""
    return cast(Tensor, _OPS.uniform(size, low, high, seed, dtype))


def scale_loss_grad(like: Tensor, value: float) -> Tensor:
    """Fill a new tensor of `like`'s shape and dtype with `value`: the seed of the backward pass."""
    return cast(Tensor, _OPS.scale_loss_grad(like, value))


def auc(predict: Tensor, label: Tensor, stat_pos: Tensor, stat_neg: Tensor) -> Tensor:
    """Add a batch to the buckets int64[num_thresholds + 1] and return the area under the curve so far, float64 0-d."""
    return cast(Tensor, _OPS.auc(predict, label, stat_pos, stat_neg))


def accuracy(topk_indices: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count rows of topk [n, k] that hold their label: (share float32, correct int32, total int32), all 0-d."""
    return cast(tuple[Tensor, Tensor, Tensor], _OPS.accuracy(topk_indices, label))
