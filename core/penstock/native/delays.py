"""`penstock::delayed`: a tensor that may be used only when another one is there.

    delayed(Tensor(a) x, Tensor until) -> Tensor(a)

Returns a view of `x`; of `until` nothing is read. A graph runs operators as soon as their operands are there: what is
computed from a delayed operand begins behind the operator that makes `until`, so that its results take no memory
before they are needed (program/training/recomputation.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define("delayed(Tensor(a) x, Tensor until) -> Tensor(a)")


def _delayed(x: Tensor, until: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]  # torch


_LIBRARY.impl("delayed", _delayed, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::delayed", _delayed, lib=_LIBRARY)
