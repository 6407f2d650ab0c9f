"""Which server has which block of which parameter: cut, then dispatched.

Every node computes the same placement from the same program, endpoints and settings. Blocks are dispatched in the order
in which gradients are sent, by the name of the parameter's block, which no trainer's number is part of. A distributed
table is cut by the values of its ids, so every server has a part of it. Pure. Source: spec 3.1, 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import SpecError
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.dispatch import VarBlock, dispatched, slice_variable
from penstock.transpile.partition import Partition, Update


@dataclass(frozen=True, slots=True)
class Placed:
    """One block of a parameter on a server. `gradient`: the parameter's, as role_vars name it.

    `distributed`: `block` is the whole table, of which the server has the rows of its ids.
    """

    block: VarBlock
    endpoint: str
    parameter: str
    gradient: str
    sparse: bool
    distributed: bool

    @property
    def name(self) -> str:
        """The block's name on the wire and on the server."""
        return self.block.name


@dataclass(frozen=True, slots=True)
class Placement:
    """All blocks, in the order of sending. Disjoint and complete: each row of each parameter is on one server."""

    endpoints: tuple[str, ...]
    blocks: tuple[Placed, ...]

    def of_parameter(self, name: str) -> list[Placed]:
        """Return the blocks of a parameter, ascending; of a distributed table one for each server."""
        return [one for one in self.blocks if one.parameter == name]

    def on(self, endpoint: str) -> list[Placed]:
        """Return what a server has, in the order of sending."""
        return [one for one in self.blocks if one.endpoint == endpoint]

    def parameters(self) -> list[str]:
        """Return the parameters in the order of sending."""
        return list(dict.fromkeys(one.parameter for one in self.blocks))


def place(partition: Partition, endpoints: Sequence[str], config: DistributeTranspilerConfig) -> Placement:
    """Cut the parameters of `partition` and place the blocks. Raises SpecError for a dispatcher that disagrees."""
    updates = _send_order(partition, config)
    cut = {u.parameter: _cut(u, len(endpoints), config) for u in updates}
    chosen = _dispatch([cut[u.parameter] for u in updates if not u.distributed], endpoints, config)
    blocks: list[Placed] = []
    for u in updates:
        for block in cut[u.parameter]:
            where = endpoints if u.distributed else [chosen[block.name]]
            blocks += [Placed(block, e, u.parameter, u.gradient, u.sparse, u.distributed) for e in where]
    return Placement(tuple(endpoints), tuple(blocks))


def _send_order(partition: Partition, config: DistributeTranspilerConfig) -> list[Update]:
    """The order of the updates; of variables that are not cut shuffled, so that sizes mix (spec 1.7)."""
    updates = list(partition.updates)
    if config.slice_var_up:
        return updates
    order = np.random.RandomState(partition.program.seed % 2**32).permutation(len(updates))
    return [updates[int(i)] for i in order]


def _cut(update: Update, num_servers: int, config: DistributeTranspilerConfig) -> list[VarBlock]:
    if update.distributed or not update.row_wise or not config.slice_var_up or not update.shape:
        rows = update.shape[0] if update.shape else 1
        if math.prod(update.shape) <= 0:
            slice_variable(update.parameter, update.shape, 1, config.min_block_size)  # says what is wrong
        return [VarBlock(update.parameter, 0, 0, rows, update.numel, whole=True)]
    return slice_variable(update.parameter, update.shape, num_servers, config.min_block_size)


def _dispatch(
    cut: Sequence[Sequence[VarBlock]], endpoints: Sequence[str], config: DistributeTranspilerConfig
) -> dict[str, str]:
    """Ask the dispatcher for the gradients, variable by variable, then for the parameters, all at once, as Fluid."""
    dispatcher = config.split_method(endpoints)
    names = [block.name for blocks in cut for block in blocks]
    for_gradients = [endpoint for blocks in cut for endpoint in dispatched(dispatcher, blocks)]
    dispatcher.reset()
    for_parameters = dispatched(dispatcher, [block for blocks in cut for block in blocks])
    for name, gradient, parameter in zip(names, for_gradients, for_parameters, strict=True):
        if gradient != parameter:
            raise SpecError(
                f"{type(dispatcher).__name__} sends the gradient of {name!r} to {gradient!r}, but has the parameter on "
                f"{parameter!r}; after reset() it has to give the same endpoints for the same variables",
                variable=name,
            )
    return dict(zip(names, for_parameters, strict=True))
