"""Torch tensors as tensors of messages, and back, without copies."""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import PeerError
from penstock.ps.wire import ITEM_SIZES, WireTensor

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor, as a numpy array that looks at them."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2:
        # Torch takes any stride of no or one element for contiguous, but does not view it as bytes (numpy's empty: 0).
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def to_wire(name: str, tensor: torch.Tensor) -> WireTensor:
    """Return a view of a contiguous CPU tensor's bytes. Raises PeerError for a dtype that does not travel."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise PeerError(f"tensor {name!r} is {tensor.dtype}; what travels is {', '.join(ITEM_SIZES)}")
    return WireTensor(name, dtype, tuple(tensor.shape), memoryview(bytes_of(tensor.contiguous())))


def from_wire(tensor: WireTensor) -> torch.Tensor:
    """Return a tensor that looks at the message's bytes: valid as long as they are. Never write to it."""
    dtype = _DTYPES[tensor.dtype]
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    # torch warns of memory that it may not write; bytes are such.
    data = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
