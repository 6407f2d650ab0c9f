"""What a user feeds as the gradient of the loss (gradient_scale_strategy Customized). Pure functions over tensors.

With one feed dict, `<loss>@GRAD` is an array with one entry for each replica; in a feed list, each dict has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import FeedError
from penstock.exec.feeding import converted, loss_gradients
from penstock.program.ir import VarDesc
from penstock.program.program import Program

Feed = Mapping[str, Any] | Sequence[Any] | None
Shares = list[dict[str, torch.Tensor]]


def split_with_loss_gradients(
    program: Program, feed: Feed, num_replicas: int, split: Callable[[Feed], Shares]
) -> Shares:
    """Return the feed of each active replica, the gradient of the loss among it. `split` does it for all other feeds.

    Of an array's entries the first go to the replicas that have rows. Raises FeedError if one is missing or has
    another number of entries, and what `split` raises.
    """
    made_by = loss_gradients(program)
    given = feed or {}
    if isinstance(given, Mapping):
        shares = split({n: v for n, v in given.items() if n not in made_by})
        for name, source in made_by.items():
            entries = _entries(program.variables[name], given, num_replicas, source)
            for share, entry in zip(shares, entries, strict=False):  # a small batch has fewer shares
                share[name] = entry
        return shares
    rest = [{n: v for n, v in d.items() if n not in made_by} if isinstance(d, Mapping) else d for d in given]
    shares = split(rest)
    for share, own in zip(shares, given, strict=True):
        for name, source in made_by.items():
            (share[name],) = _entries(program.variables[name], own, 1, source)
    return shares


def _entries(var: VarDesc, feed: Mapping[str, Any], number: int, source: str) -> list[torch.Tensor]:
    sizes = [int(str(d)) for d in var.shape]  # a loss has one element, so no batch
    wanted = f"{var.dtype}[{number}]"
    which = "one entry for each replica" if number > 1 else "the replica's one entry"
    if var.name not in feed:
        raise FeedError(
            f"{var.name!r} (the gradient of the loss, recorded at {source}) is not fed. With gradient_scale_strategy "
            f"Customized nothing computes it: feed it as {wanted}, {which}, e.g. "
            f"numpy.full({number}, 1 / {number}, {var.dtype!r})",
            variable=var.name, expected=wanted,
        )  # fmt: skip
    tensor = converted(var, feed[var.name])
    if tensor.numel() != number * math.prod(sizes) or (number > 1 and tensor.shape[0] != number):
        raise FeedError(
            f"feed {var.name!r} has shape {list(tensor.shape)}, but the gradient of the loss (recorded at {source}) is "
            f"fed as {wanted}: {which} (CPU_NUM)",
            variable=var.name, got=list(tensor.shape), expected=wanted,
        )  # fmt: skip
    return [t.clone() for t in tensor.reshape(number, *sizes).unbind(0)]
