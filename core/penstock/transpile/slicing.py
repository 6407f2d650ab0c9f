"""Cut variables into blocks for parameter servers.

A block is a range of rows (of elements for a vector), so that its gradient, its optimizer state and its rows are cut
the same way. Source: slice_variable (Fluid 1.8), spec 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
