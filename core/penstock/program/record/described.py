"""Results on fakes of operators that run blocks: as the blocks describe them, with nothing tried at concrete batches.

Sizes with `min` and `max` (`x[:20]` in a branch) have no expression that a few batches would show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.program.control import loops
from penstock.program.control.kernel import compiled
from penstock.program.record.arithmetic import of_dim
from penstock.program.record.fakes import CPU, Fake, empty_fake
from penstock.program.record.sizes import size_of


def _results(
    kind: str, inputs: Sequence[Any], sizes: Sequence[Any], texts: Sequence[str], counts: Sequence[int]
) -> list[torch.Tensor]:
    block = compiled(texts[0])
    bound = {name: size_of(size) for name, size in zip(block.block.symbols, sizes, strict=True)}
    symbolic = next((size.node.sizes for size in sizes if isinstance(size, torch.SymInt)), None)
    place = next((x.place for x in inputs if isinstance(x, Fake)), CPU)
    made: list[torch.Tensor] = []
    for var, first in loops.results_of(kind, block, inputs, counts):
        own = [of_dim(dim, bound) for dim in var.shape][first.dropped :]
        rest = [symbolic.int_of(size) if symbolic is not None else size.number for size in own]
        shape = [0] if var.kind == "array" else [*first.added, *rest]
        made.append(empty_fake(shape, None, getattr(torch, var.dtype), place))
    return made


def _gradients(grads: Any, kind: str, inputs: Sequence[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
    return [empty_fake(list(inputs[at].shape), None, inputs[at].dtype, inputs[at].device) for at in rest[-1]]


DESCRIBED: Mapping[Any, Callable[..., list[torch.Tensor]]] = {
    torch.ops.penstock.control.default: _results,
    torch.ops.penstock.control_backward.default: _gradients,
}
"""Operators whose results are known from their operands -> the results."""
