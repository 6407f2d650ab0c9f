"""Fake kernels of the operators that passes put into a graph: shapes and dtypes without values.

They are never recorded from a user's program, so they have no typed call and no derivative; `ops` registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _writes_only(*arguments: Any) -> None:
    """An operator that changes its operands and returns nothing."""


def _channel_sums(x: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty([3, x.shape[1]], dtype=torch.float64)


def _gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    return _channel_sums(x)


def _normalised(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty([x.shape[1]]), x.new_empty([x.shape[1]])


def _normalised_gradients(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _normalised(x)


PASS_FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    "fused_all_reduce_": _writes_only,
    "fused_sgd_": _writes_only,
    "fused_momentum_": _writes_only,
    "fused_adagrad_": _writes_only,
    "fused_adam_": _writes_only,
    "batch_norm_stats": _channel_sums,
    "sync_batch_norm": _normalised,
    "batch_norm_grad_stats": _gradient_sums,
    "sync_batch_norm_backward": _normalised_gradients,
}
