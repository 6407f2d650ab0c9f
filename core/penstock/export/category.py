"""The category of an operator, which is its colour in the dashboard (`bucketOf` in web/src/graph/group.ts). Pure."""

from __future__ import annotations

from typing import Literal

from penstock.protocol.graphdoc import Op

Category = Literal["forward", "backward", "optimize", "communication", "input"]
_EXCHANGES = frozenset({"all_reduce", "reduce", "broadcast", "gather", "rpc"})


def category_of(op: Op) -> Category:
    """Return what an operator is for."""
    if op.kind in _EXCHANGES or op.role == "communication":
        return "communication"
    if op.kind in ("feed", "fetch") or op.role == "input":
        return "input"
    if op.role == "backward" or op.kind == "scale_loss_grad":
        return "backward"
    if op.role in ("optimize", "lr_sched"):
        return "optimize"
    return "forward"
