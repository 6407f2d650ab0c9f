"""Gradients in 16 bits on the wire: what a trainer sends over a network, and what a server makes of it.

Off unless `wire_dtype` asks for it. Only float32 is narrowed, only pushes, and only where they leave the host: what is
pulled or looked up, and what processes of one host exchange, keeps its dtype.
"""

from __future__ import annotations

import torch

from penstock.ps.remote import WIRE_DTYPES

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in WIRE_DTYPES}


def narrowed(values: torch.Tensor, wire_dtype: str) -> torch.Tensor:
    """Return float32 `values` of any shape in `wire_dtype`, rounded to nearest; of another dtype as they are.

    Finite values beyond the largest finite one of `wire_dtype` (float16: 65504) become that one, so that a large
    gradient does not become infinite; infinities and NaN stay what they are. float16 has no values below 6e-8.
    """
    dtype = _DTYPES[wire_dtype]
    if dtype == torch.float32 or values.dtype != torch.float32:
        return values
    largest = torch.finfo(dtype).max
    narrow = values.clamp(-largest, largest).to(dtype)
    infinite = values.isinf()
    return torch.where(infinite, values.to(dtype), narrow) if bool(infinite.any()) else narrow


def widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a push's values in the dtype of their block, if they were narrowed from it; else as they are."""
    is_narrow = dtype == torch.float32 and values.dtype in _DTYPES.values()
    return values.to(dtype) if is_narrow else values
