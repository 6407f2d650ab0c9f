"""How gradients of one variable become one: added (or averaged) element by element, sparse ones row by row.

Pure. Sum is right for SGD, whose update is linear in the gradient; average keeps the size of a gradient for the others
(communicator_is_sgd_optimizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import PeerError
from penstock.ps.rows import summed


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of one variable, in one step: a tensor for each block, or with `rows` int64[n] one of their values [n, d].

    Rows are any int64 and may repeat.
    """

    values: tuple[Tensor, ...]
    rows: Tensor | None = None

    def copy(self) -> Gradient:
        """Return a gradient with memory of its own."""
        return Gradient(tuple(v.clone() for v in self.values), None if self.rows is None else self.rows.clone())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        rows = 0 if self.rows is None else self.rows.nbytes
        return rows + sum(v.nbytes for v in self.values)


def merge(gradients: Sequence[Gradient], *, average: bool) -> Gradient:
    """Return the sum or the average of gradients of one variable; rows come out ascending, each once.

    Summed in the given order; the average is over the gradients, whichever rows each of them has. Memory of the first
    may be reused. Raises PeerError if they do not fit together.
    """
    sparse = {g.rows is not None for g in gradients}
    widths = {tuple(tuple(v.shape[1:] if g.rows is not None else v.shape) for v in g.values) for g in gradients}
    if len(sparse) != 1 or len(widths) != 1:
        raise PeerError(f"gradients of one variable that do not fit together cannot be merged: {sorted(widths)}")
    divisor = len(gradients) if average else 1
    return _merge_rows(gradients, divisor) if sparse == {True} else _merge_dense(gradients, divisor)


def _merge_dense(gradients: Sequence[Gradient], divisor: int) -> Gradient:
    merged = gradients[0].values
    for other in gradients[1:]:
        for mine, more in zip(merged, other.values, strict=True):
            mine.add_(more)
    if divisor > 1:
        for mine in merged:
            mine.div_(divisor)
    return Gradient(merged)


def _merge_rows(gradients: Sequence[Gradient], divisor: int) -> Gradient:
    rows, values = summed(
        torch.cat([g.rows for g in gradients if g.rows is not None]), torch.cat([g.values[0] for g in gradients])
    )
    return Gradient((values.div_(divisor) if divisor > 1 else values,), rows)
