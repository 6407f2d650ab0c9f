"""What trainers bring to a meeting, and the sum of it, in the order of trainers: everybody is told the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import PeerError
from penstock.ps.tensors import from_wire
from penstock.ps.wire import Message


def brought(message: Message) -> torch.Tensor | None:
    """Return a copy of what a `meet` brings: the request is over before the others have added it. Raises PeerError."""
    names = [t.name for t in message.tensors]
    if names not in ([], ["values"]):
        raise PeerError(f"a trainer comes to a meeting with the tensors {names}; expected [values] or none")
    if not names:
        return None
    values = from_wire(message.tensors[0])
    if values.dtype == torch.bool:
        raise PeerError("a trainer comes to a meeting with truth values, which have no sum; send them as numbers")
    return values.clone()


def total_of(parts: Sequence[object]) -> torch.Tensor | None:
    """Return the sum of what `brought` gave for each trainer. Raises PeerError if they do not fit each other."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    kinds = {"nothing" if not isinstance(p, torch.Tensor) else f"{p.dtype}{list(p.shape)}" for p in parts}
    if len(kinds) > 1:
        raise PeerError(f"the trainers that meet bring {', '.join(sorted(kinds))}; all have to bring the same")
    if not tensors:
        return None
    total = tensors[0].clone()
    for part in tensors[1:]:
        total += part
    return total
