"""Attention against torch's, on two sequences of five positions. Imported by tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.native import ops as _ops  # noqa: F401 - registers the operators

OPS: Any = torch.ops.penstock
Pairs = list[tuple[Tensor, Tensor]]


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of two sequences, three heads, five positions."""
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    return query, key, value


def attention() -> Pairs:
    q, k, v = (part.detach() for part in heads())
    found = [OPS.attention(q, k, v, 0.0, causal)[0] for causal in (False, True)]
    wanted = [functional.scaled_dot_product_attention(q, k, v, is_causal=causal) for causal in (False, True)]
    return list(zip(found, wanted, strict=True))


def attention_backward() -> Pairs:
    parts = heads()
    q, k, v = (part.detach() for part in parts)
    grad = torch.randn_like(q)
    out, sums = OPS.attention(q, k, v, 0.0, True)
    made = functional.scaled_dot_product_attention(*parts, is_causal=True)
    wanted = torch.autograd.grad(made, parts, grad)
    return list(zip(OPS.attention_backward(grad, q, k, v, out, sums, 0.0, True), wanted, strict=True))


ATTENTION = (attention, attention_backward)
