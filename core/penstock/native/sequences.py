"""Operators over ragged sequences: their fake kernels and derivatives; the kernels are in src/ops/sequences.cpp.

`lengths` int64 [n] or [n, 1] adds up to the rows, which lie one sequence after another.
`sequence_pool`: one row for each sequence, and for 'max' the rows that the maxima are from.
`sequence_rows`: for each row its 'sequence', its 'position' there, or its 'mirror', the row as far from the other end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OPS = torch.ops.penstock


def _sequence_pool(x: Tensor, lengths: Tensor, kind: str, pad_value: float) -> tuple[Tensor, Tensor]:
    sizes = [lengths.numel(), *x.shape[1:]]
    return x.new_empty(sizes), lengths.new_empty(sizes if kind == "max" else [0])


def _sequence_pool_backward(grad: Tensor, index: Tensor, lengths: Tensor, rows: int, kind: str) -> Tensor:
    return grad.new_empty([rows, *grad.shape[1:]])


def _sequence_rows(lengths: Tensor, rows: int, kind: str) -> Tensor:
    return lengths.new_empty([rows])


def _pool_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, lengths, ctx.kind, _ = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(output[1], lengths)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else a zeros operator for the gradient of the rows would be recorded


def _pool_derivative(ctx: Any, grad: Tensor | None, _index_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    index, lengths = ctx.saved_tensors
    found = None if grad is None else _OPS.sequence_pool_backward(grad, index, lengths, ctx.rows, ctx.kind)
    return found, None, None, None


def register() -> None:
    """Give torch the fake kernels and derivatives. Called once, when the native library is loaded."""
    for name, kernel in (
        ("sequence_pool", _sequence_pool),
        ("sequence_pool_backward", _sequence_pool_backward),
        ("sequence_rows", _sequence_rows),
    ):
        torch.library.register_fake(f"penstock::{name}", kernel)
    torch.library.register_autograd("penstock::sequence_pool", _pool_derivative, setup_context=_pool_context)
