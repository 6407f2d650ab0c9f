"""`penstock.checked_lengths`: the lengths of padded sequences, checked when they are fed.

Invariant: what is returned is a copy whose every number is between 0 and the steps of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define("checked_lengths(Tensor lengths, SymInt steps, str layer) -> Tensor")


def _checked_lengths(lengths: Tensor, steps: int, layer: str) -> Tensor:
    """Raises ValueError for a length below 0 or above the steps."""
    flat = lengths.reshape(-1)
    wrong = ((flat < 0) | (flat > steps)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"penstock.checked_lengths: lengths of {layer} hold {flat[row].item()} at row {row}; "
            f"expected 0 to {steps}, the steps of its input"
        )
    return lengths.clone(memory_format=torch.contiguous_format)


def _shape(lengths: Tensor, steps: int, layer: str) -> Tensor:
    return lengths.new_empty(lengths.shape)


_LIBRARY.impl("checked_lengths", _checked_lengths, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::checked_lengths", _shape, lib=_LIBRARY)
