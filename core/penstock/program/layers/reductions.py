"""Reductions. A scalar is fetched as [1] a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.program.record.context import default_main_program, name_scope

Dims = int | Sequence[int] | None


def mean(x: Any, name: str | None = None) -> Any:
    """Return the mean of all elements."""
    with name_scope(name or default_main_program().unique("mean")):
        return x.mean()


def _dims(x: Any, dim: Dims) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def reduce_sum(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the sum over `dim`, or over all elements."""
    with name_scope(name or default_main_program().unique("reduce_sum")):
        return input.sum() if dim is None else input.sum(dim, keepdim=keep_dim)


def reduce_mean(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the mean over `dim`, or over all elements."""
    with name_scope(name or default_main_program().unique("reduce_mean")):
        return input.mean() if dim is None else input.mean(dim, keepdim=keep_dim)


def reduce_max(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the maximum over `dim`, or over all elements; equal maxima share the gradient."""
    with name_scope(name or default_main_program().unique("reduce_max")):
        return torch.amax(input, _dims(input, dim), keep_dim)


def reduce_min(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the minimum over `dim`, or over all elements; equal minima share the gradient."""
    with name_scope(name or default_main_program().unique("reduce_min")):
        return torch.amin(input, _dims(input, dim), keep_dim)


def reduce_prod(input: Any, dim: Dims = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the product over `dim`, or over all elements."""
    with name_scope(name or default_main_program().unique("reduce_prod")):
        # One dimension after another, the last first, so that positions stay what they are.
        for position in sorted((d % input.ndim for d in _dims(input, dim)), reverse=True):
            input = input.prod(position, keepdim=keep_dim)
        return input
