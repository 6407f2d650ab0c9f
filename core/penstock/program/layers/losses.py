"""Losses and reductions in Fluid's shapes: one value a row is [n, 1]; a scalar is fetched as [1] a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.program.record.context import default_main_program, name_scope

_TINY = 1e-20  # Fluid's TolerableValue: the logarithm of a probability that underflowed stays finite


def cross_entropy(input: Any, label: Any, soft_label: bool = False, ignore_index: int = -100) -> Any:
    """Return -log p[label] for each row.

    Shapes: input [n, classes] probabilities; label int64 [n, 1], or [n, classes] with soft_label; result [n, 1].
    """
    with name_scope(default_main_program().unique("cross_entropy")):
        logs = torch.log(input.clamp_min(_TINY)) if soft_label else None
        if logs is not None:
            return -(label * logs).sum(-1, keepdim=True)
        picked = torch.gather(input, -1, label if ignore_index < 0 else label.clamp_min(0))
        loss = -torch.log(picked.clamp_min(_TINY))
        return loss if ignore_index < 0 else torch.where(label == ignore_index, torch.zeros_like(loss), loss)


def softmax_with_cross_entropy(logits: Any, label: Any, soft_label: bool = False, ignore_index: int = -100) -> Any:
    """Return the cross entropy of softmax(logits), computed from the logits. Shapes as `cross_entropy`."""
    with name_scope(default_main_program().unique("softmax_with_cross_entropy")):
        logs = F.log_softmax(logits, -1)
        if soft_label:
            return -(label * logs).sum(-1, keepdim=True)
        loss = -torch.gather(logs, -1, label if ignore_index < 0 else label.clamp_min(0))
        return loss if ignore_index < 0 else torch.where(label == ignore_index, torch.zeros_like(loss), loss)


def square_error_cost(input: Any, label: Any) -> Any:
    """Return (input - label)^2, elementwise."""
    with name_scope(default_main_program().unique("square_error_cost")):
        difference = input - label
        return difference * difference


def mean(x: Any, name: str | None = None) -> Any:
    """Return the mean of all elements."""
    with name_scope(name or default_main_program().unique("mean")):
        return x.mean()


def reduce_sum(
    input: Any, dim: int | Sequence[int] | None = None, keep_dim: bool = False, name: str | None = None
) -> Any:
    """Return the sum over `dim`, or over all elements."""
    with name_scope(name or default_main_program().unique("reduce_sum")):
        return input.sum() if dim is None else input.sum(dim, keepdim=keep_dim)


def reduce_mean(
    input: Any, dim: int | Sequence[int] | None = None, keep_dim: bool = False, name: str | None = None
) -> Any:
    """Return the mean over `dim`, or over all elements."""
    with name_scope(name or default_main_program().unique("reduce_mean")):
        return input.mean() if dim is None else input.mean(dim, keepdim=keep_dim)
