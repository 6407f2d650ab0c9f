"""`penstock::gather_tree`: the ids on the way to each beam of the last step. Source: gather_tree_op.h (Fluid 1.8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define("gather_tree(Tensor ids, Tensor parents) -> Tensor")


def _gather_tree(ids: Tensor, parents: Tensor) -> Tensor:
    """Shapes: int [time, batch, beams], all three. Raises ValueError for two different ones."""
    if ids.shape != parents.shape or ids.dim() != 3:
        raise ValueError(
            f"penstock.gather_tree: ids {list(ids.shape)} and parents {list(parents.shape)}; expected [time, batch, "
            "beams] of both"
        )
    found = torch.empty_like(ids)
    at = torch.arange(ids.shape[2]).expand(ids.shape[1:])
    for step in range(ids.shape[0] - 1, -1, -1):
        found[step] = ids[step].gather(1, at)
        at = parents[step].long().gather(1, at)
    return found


_LIBRARY.impl("gather_tree", _gather_tree, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::gather_tree", lambda ids, parents: torch.empty_like(ids), lib=_LIBRARY)
