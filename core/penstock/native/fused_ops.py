"""Fake kernels of the operators that passes put in the place of several: shapes and dtypes without values.

Importing this module loads the native library. What each operator computes is in `docs/matrix-kernels.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.native import load_operators

load_operators()


def _product(
    x: Tensor, w: Tensor, bias: Tensor | None, transpose_x: bool, transpose_w: bool, activation: str, kernel: str
) -> Tensor:
    left, right = x.mT if transpose_x else x, w.mT if transpose_w else w
    return left.new_empty([*left.shape[:-1], right.shape[-1]])


def _fused_add_act(x: Tensor, y: Tensor, activation: str, scale: float) -> Tensor:
    return torch.empty_like(x + y)


def _max_pool_2x2(x: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    sizes = [*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2]
    return x.new_empty(sizes), x.new_empty(sizes, dtype=torch.uint8)


def _max_pool_2x2_backward(grad: Tensor, places: Tensor) -> Tensor:
    return grad.new_empty([*grad.shape[:2], 2 * grad.shape[2], 2 * grad.shape[3]])


def _lookup_concat(
    tables: list[Tensor], ids: list[Tensor], padding_idx: list[int], parts: list[Tensor], order: list[int]
) -> Tensor:
    columns = sum(tables[k].shape[1] if k >= 0 else parts[-1 - k].shape[1] for k in order)
    return tables[0].new_empty([ids[0].numel(), columns])


def _lookup_pool(
    table: Tensor, ids: Tensor, lengths: Tensor, padding_idx: int, pad_value: float
) -> tuple[Tensor, Tensor]:
    return table.new_empty([lengths.numel(), table.shape[1]]), lengths.new_empty([0])


def _writes_only(*arguments: Any) -> None:
    """An operator that changes its operands and returns nothing."""


_FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    "product": _product,
    "product_by": _product,
    "fused_add_act": _fused_add_act,
    "max_pool_2x2": _max_pool_2x2,
    "max_pool_2x2_backward": _max_pool_2x2_backward,
    "lookup_concat": _lookup_concat,
    "lookup_pool": _lookup_pool,
    "fused_sparse_sgd_": _writes_only,
    "fused_sparse_adam_": _writes_only,
    "fused_sparse_adagrad_": _writes_only,
}
for _name, _kernel in _FAKE_KERNELS.items():
    torch.library.register_fake(f"penstock::{_name}", _kernel)


def mkl_vendor_check() -> str:
    """Return how MKL's question whether the processor is its vendor's is answered: 'yes', 'no', or 'absent'."""
    return {1: "yes", 0: "no"}.get(int(torch.ops.penstock.mkl_vendor_check()), "absent")
