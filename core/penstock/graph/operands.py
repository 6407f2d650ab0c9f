"""Concrete operands of a handle: symbols bound to its replica's sizes, the loss scale filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.graph.ssa import OpHandle
from penstock.program.ir import Arg


@dataclass(frozen=True, slots=True)
class Shares:
    """What differs from replica to replica in one run.

    `bindings[r]`: size symbols of replica r (for every active one). `scales[r]`: gradient of the loss on replica r.
    """

    bindings: Sequence[Mapping[str, int]]
    scales: Sequence[float]


def operands(handle: OpHandle, shares: Shares) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Return (args, kwargs) in which only the size expressions still need `shares.bindings[handle.rows_of]`."""
    args = handle.op.args
    if handle.kind == "scale_loss_grad":
        args = (args[0], shares.scales[handle.replica])
    return args, handle.op.kwargs
