"""The arithmetic of GEO on one block: what a trainer tells of its own progress, and takes over of the others'.

`parameter` is what the trainer trains; `old` what the servers had when it last heard of them, and its own progress
that it has told them since. Pure: changes the tensors that it is given, in place.

Invariant: with one trainer old equals the servers' value to the bit, because both add the same deltas to the same
values in the same order; so taking over adds exact zeros.
"""

from __future__ import annotations

from torch import Tensor


def outgoing(parameter: Tensor, old: Tensor, num_trainers: int) -> Tensor:
    """Return this trainer's share of the progress since the last exchange, and count it as told."""
    delta = (parameter - old).div_(num_trainers)
    old.add_(delta)
    return delta


def incoming(parameter: Tensor, old: Tensor, server: Tensor) -> None:
    """Take over what the others did: the servers' value is now `server`."""
    parameter.add_(server - old)
    old.copy_(server)


def outgoing_rows(parameter: Tensor, old: Tensor, rows: Tensor, num_trainers: int) -> Tensor:
    """`outgoing` of some rows, each once."""
    before = old[rows]
    delta = (parameter[rows] - before).div_(num_trainers)
    old[rows] = before.add_(delta)
    return delta


def incoming_rows(parameter: Tensor, old: Tensor, rows: Tensor, server: Tensor) -> None:
    """`incoming` of some rows, each once."""
    parameter.index_add_(0, rows, server - old[rows])
    old[rows] = server
