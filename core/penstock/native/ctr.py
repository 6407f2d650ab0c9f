"""What models of clicks do to features: statistics of `data_norm`, and counts of impressions and clicks.

    data_norm_update_(Tensor(a!) size, Tensor(b!) sum, Tensor(c!) square, Tensor x, Tensor means, float epsilon,
                      float decay, int slot_dim, bool training) -> ()

adds a batch's mean, and mean square distance from `means` plus epsilon, to statistics that decay. With `slot_dim` > 0 a
slot of a row whose first value is zero does not count.

    cvm(Tensor x, Tensor counts, bool keeps) -> Tensor

The first two columns are impressions and clicks: log(x + 1) and the difference of both logarithms, or left out. Their
gradient is `counts`, whatever comes back.
Source: data_norm_op.cc, data_norm_op.cu, cvm_op.h (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define(
    "data_norm_update_(Tensor(a!) size, Tensor(b!) sum, Tensor(c!) square, Tensor x, Tensor means, float epsilon, "
    "float decay, int slot_dim, bool training) -> ()"
)
_LIBRARY.define("cvm(Tensor x, Tensor counts, bool keeps) -> Tensor")

_NO_SHOW = 1e-7


def shown(x: Tensor, slot_dim: int) -> Tensor:
    """Return whether the slot of each element of x [n, c] counts, bool [n, c]."""
    first = x[:, ::slot_dim].abs() >= _NO_SHOW
    return first.repeat_interleave(slot_dim, 1)


def _update(
    size: Tensor,
    sum: Tensor,
    square: Tensor,
    x: Tensor,
    means: Tensor,
    epsilon: float,
    decay: float,
    slot_dim: int,
    training: bool,
) -> None:
    if not training or not x.shape[0]:
        return
    counts = shown(x, slot_dim).to(x.dtype) if slot_dim > 0 else torch.ones_like(x)
    number = counts.sum(0)
    whole, away = number.clamp(min=1.0), (x - means) ** 2
    # As Fluid has it: with slots epsilon counts once for each row.
    floor = epsilon * number if slot_dim > 0 else torch.full_like(number, epsilon)
    for kept, new in (
        (size, (number > 0).to(x.dtype)),
        (sum, (x * counts).sum(0) / whole),
        (square, (away * counts).sum(0) / whole + floor),
    ):
        kept.mul_(decay).add_(new)


def _nothing(*operands: Any) -> None:
    """The update returns nothing."""


def _cvm(x: Tensor, counts: Tensor, keeps: bool) -> Tensor:
    if not keeps:
        return x[:, 2:].clone(memory_format=torch.contiguous_format)
    found = x.clone(memory_format=torch.contiguous_format)
    found[:, :2] = torch.log(found[:, :2] + 1.0)
    found[:, 1] -= found[:, 0]
    return found


def _cvm_shape(x: Tensor, counts: Tensor, keeps: bool) -> Tensor:
    if x.dim() != 2 or counts.dim() != 2 or counts.shape[1] != 2:
        raise ValueError(
            f"penstock.cvm: x has shape {list(x.shape)} and counts {list(counts.shape)}; expected [n, c] and [n, 2]"
        )
    return x.new_empty([x.shape[0], x.shape[1] if keeps else x.shape[1] - 2])


def _cvm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, counts, ctx.keeps = inputs
    ctx.save_for_backward(counts)


def _cvm_derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    return torch.cat([counts.to(grad.dtype), grad[:, 2:] if ctx.keeps else grad], 1), None, None


_LIBRARY.impl("data_norm_update_", _update, "CompositeExplicitAutograd")
_LIBRARY.impl("cvm", _cvm, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::data_norm_update_", _nothing, lib=_LIBRARY)
torch.library.register_fake("penstock::cvm", _cvm_shape, lib=_LIBRARY)
torch.library.register_autograd("penstock::cvm", _cvm_derivative, setup_context=_cvm_context, lib=_LIBRARY)
