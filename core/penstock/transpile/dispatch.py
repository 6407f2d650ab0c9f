"""Variables cut into blocks, and which server gets which block: RoundRobin, HashName, or a class of the user's.

A block is a range of rows (of elements for a vector), so that its gradient, its optimizer state and its rows are cut
the same way.

A dispatcher is asked twice for the same blocks in the same order, with `reset` in between: for gradients and for
parameters, which must agree. Source: slice_variable, ps_dispatcher.py (Fluid 1.8), spec 1.8, 3.1
and X8.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError

MIN_BLOCK_SIZE = 8192


@dataclass(frozen=True, slots=True)
class VarBlock:
    """Rows [first_row, first_row + num_rows) of `variable`; `numel` elements. `whole`: the variable is not cut."""

    variable: str
    index: int
    first_row: int
    num_rows: int
    numel: int
    whole: bool

    @property
    def name(self) -> str:
        """`w.block0`, or `w` for a variable that is not cut."""
        return self.variable if self.whole else f"{self.variable}.block{self.index}"

    def __str__(self) -> str:
        return f"{self.variable}:{self.index}:{self.numel}"


def slice_variable(name: str, shape: Sequence[int], num_slices: int, min_block_size: int) -> list[VarBlock]:
    """Cut one variable into at most `num_slices` blocks of at least `min_block_size` elements, on row boundaries.

    Order: blocks are contiguous and ascending. Deterministic. Raises SpecError for a variable without elements.
    """
    numel, width = math.prod(shape), math.prod(shape[1:])
    if numel <= 0:
        raise SpecError(
            f"parameter {name!r} has shape {list(shape)}, so no elements to place on a server", variable=name
        )
    wanted = min(num_slices, max(1, numel // min_block_size))
    size = math.ceil(numel / wanted)
    size += -size % width  # whole rows
    count = math.ceil(numel / size)
    blocks = []
    for index in range(count):
        elements = min(size, numel - index * size)
        blocks.append(VarBlock(name, index, index * size // width, elements // width, elements, whole=count == 1))
    return blocks


def check_min_block_size(value: int) -> None:
    """Raise SpecError for a block size below Fluid's smallest."""
    if value < MIN_BLOCK_SIZE:
        raise SpecError(
            f"min_block_size is {value}; blocks below {MIN_BLOCK_SIZE} elements cost more to send than to update",
            got=value,
            expected=f"at least {MIN_BLOCK_SIZE}",
        )


class PSDispatcher:
    """Base of all dispatchers. A subclass defines `dispatch`; it keeps its state between calls until `reset`."""

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        """The servers' endpoints, in the job's order."""
        return self._eps

    def reset(self) -> None:
        """Begin again: the next call of `dispatch` answers as the first one did."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Return the endpoint of each variable. Each has a `name`."""
        raise NotImplementedError(f"{type(self).__name__} has to define dispatch(varlist) -> list of endpoints")


class RoundRobin(PSDispatcher):
    """One after another, going on where the last call ended."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        chosen = []
        for _ in varlist:
            chosen.append(self._eps[self._step % len(self._eps)])
            self._step += 1
        return chosen


class HashName(PSDispatcher):
    """By the CRC-32 of the name: the same on every node and in every run (Python's `hash` of a string is neither)."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [self._eps[zlib.crc32(var.name.encode()) % len(self._eps)] for var in varlist]


def dispatched(dispatcher: PSDispatcher, varlist: Sequence[Any]) -> list[str]:
    """Ask a dispatcher, the user's own included, and check its answer. Raises SpecError."""
    said: object = dispatcher.dispatch(varlist)
    kind = type(dispatcher).__name__
    if not isinstance(said, Iterable) or isinstance(said, str):
        raise SpecError(f"{kind}.dispatch gave {said!r}; expected a list of endpoints, one for each variable")
    answer = list(said)
    if len(answer) != len(varlist):
        raise SpecError(f"{kind}.dispatch gave {len(answer)} endpoints for {len(varlist)} variables; expected one each")
    for var, endpoint in zip(varlist, answer, strict=True):
        if endpoint not in dispatcher.eps:
            raise SpecError(
                f"{kind}.dispatch sends {var.name!r} to {endpoint!r}, which is none of the servers {dispatcher.eps}",
                variable=var.name,
                got=endpoint,
            )
    return answer
