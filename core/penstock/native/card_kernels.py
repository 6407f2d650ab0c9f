"""Kernels for GPUs that torch has none for, written in Triton, which torch's CUDA builds bring.

`penstock::card_dropout` is `penstock::dropout` with its random state on the card: one kernel in place of a hundred, and
nothing of a step that the launching thread has to read, so that a CUDA graph draws other bits in each replay. Triton
compiles a kernel at its first call, for which it needs a C compiler; `dropout_fault` tries it once in a process.
Without it dropout stays a composition of torch's operators, and steps that drop are not captured.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from penstock.native import ops as _registered  # noqa: F401 - registers penstock::dropout

_BLOCK = 1024
_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch ships it without types
_library.define(  # type: ignore[no-untyped-call]  # as above
    "card_dropout(Tensor x, Tensor rng, float p, bool training, int op_seed, int batch_dim, int rows_per_sample)"
    " -> (Tensor, Tensor)"
)


@functools.cache
def dropout_fault() -> str:
    """Return '' if the kernel works on the current GPU, else why it does not. Tries it once."""
    try:
        x, rng = torch.ones(8, device="cuda"), torch.tensor([1, 1, 0], device="cuda")
        _launch(x, rng, 0.5, 1, -1, 1)
    except Exception as error:  # noqa: BLE001 - Triton and the compiler that it calls raise what they like
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _launch(
    x: Tensor, rng: Tensor, p: float, op_seed: int, batch_dim: int, rows_per_sample: int
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    has_rows = batch_dim >= 0
    outer = x.shape[:batch_dim].numel() if has_rows else 1
    batch = x.shape[batch_dim] if has_rows else x.numel()
    inner = x.shape[batch_dim + 1 :].numel() if has_rows else 1
    per_row = rows_per_sample * outer * inner if has_rows else 0
    scale = 1 / (1 - p) if p < 1 else 0.0
    if x.numel():
        from penstock.native.triton_dropout import dropout  # needs Triton, which not every torch brings

        grid = (-(-x.numel() // _BLOCK),)
        threshold = round(p * 2**32)
        with torch.cuda.device(x.device):
            dropout[grid](
                x, rng, out, mask, x.numel(), batch, inner, outer, per_row, op_seed, threshold, scale, block=_BLOCK
            )
    return out, mask


def _dropout(
    x: Tensor, rng: Tensor, p: float, training: bool, op_seed: int, batch_dim: int, rows_per_sample: int
) -> tuple[Tensor, Tensor]:
    if not training or not 0 <= p <= 1 or x.dtype == torch.float64:  # Triton takes numbers as float32
        found: tuple[Tensor, Tensor] = torch.ops.penstock.dropout(
            x, rng, p, training, op_seed, batch_dim, rows_per_sample
        )
        return found
    return _launch(x, rng.to(x.device), p, op_seed, batch_dim, rows_per_sample)


_library.impl("card_dropout", _dropout, "CUDA")  # type: ignore[no-untyped-call]  # as above
