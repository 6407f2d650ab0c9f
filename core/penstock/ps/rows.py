"""Assignment of a table's rows to servers: duplicates found once, then cut into the parts of the table.

A table is cut into ranges of rows (`heights`: rows of each part, one after another), whose rows are numbered from each
part's first, or spread by id over its parts (`heights` empty), where ids stay what they are. Pure, over torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import FeedError

Ids = npt.NDArray[np.int64]


def server_of(ids: Ids, num: int) -> Ids:
    """Return for each id a server from 0 to num - 1: the last step of splitmix64, modulo `num`.

    The same on every machine and in every version, since tables are saved by it. Consecutive ids, and ids that are
    multiples of anything, are spread evenly. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014.
    """
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(num)).astype(np.int64)


Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Table:
    """A table's parts: `blocks[i]` is on the server `at[i]` and has `heights[i]` rows, or no `heights`."""

    name: str
    blocks: tuple[str, ...]
    at: tuple[int, ...]
    heights: tuple[int, ...]

    @staticmethod
    def of(name: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int]) -> Table:
        """Return the parts as operators name them; a spread table may have one name for all its parts."""
        if not heights and len(blocks) == 1:
            blocks = [*blocks] * len(at)
        return Table(name, tuple(blocks), tuple(at), tuple(heights))


@dataclass(frozen=True, slots=True)
class Part:
    """What concerns one part of a table. `rows` int64[k] as its server numbers them, `positions` within all ids."""

    index: int
    rows: Tensor
    positions: slice | Tensor


def unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ascending different ids [u], for each id its position among them [n])."""
    grouped = _grouped(ids)
    inverse = np.empty(len(ids), np.int64)
    inverse[grouped.order] = grouped.numbers
    return grouped.different, torch.from_numpy(inverse)


def summed(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ascending different rows [u], sums [u, d] of their values, in order of appearance).

    The result is memory of its own, whatever comes in.
    """
    grouped = _grouped(rows)
    if values.dtype in _BAGGED and values.numel():
        # 20 times as fast as index_add_, and the same to the bit in float32: both add in order of appearance.
        order, firsts = torch.from_numpy(grouped.order), torch.from_numpy(grouped.firsts)
        flat = values.reshape(len(values), -1)
        bags = torch.nn.functional.embedding_bag(order, flat, firsts, mode="sum")
        return grouped.different, bags.reshape(-1, *values.shape[1:])
    inverse = np.empty(len(rows), np.int64)
    inverse[grouped.order] = grouped.numbers
    sums = torch.zeros(len(grouped.different), *values.shape[1:], dtype=values.dtype)
    return grouped.different, sums.index_add_(0, torch.from_numpy(inverse), values)


def put_back(different: Tensor, inverse: Tensor, out: Tensor) -> None:
    """Write the row of each id into `out` [n, d]: `different[inverse]`."""
    # numpy, because torch starts its threads for this and, on busy cores, waits for them.
    np.take(_array(different), inverse.numpy(), axis=0, out=_array(out), mode="clip")


_BAGGED = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Ids in ascending order, equal ones in order of appearance: id `order[k]` is in group `numbers[k]`."""

    different: Tensor
    order: Ids
    firsts: Ids
    numbers: Ids


def _grouped(ids: Tensor) -> _Grouped:
    given: Ids = ids.numpy()
    bits = max(len(given) - 1, 1).bit_length()
    place = np.arange(len(given))
    # numpy sorts whole numbers with vector instructions, but not stably: the place decides in the lowest bits.
    if len(given) and given.min() >= 0 and given.max() < 1 << (63 - bits):
        key = given << bits | place
        key.sort()
        order, ascending = key & ((1 << bits) - 1), key >> bits
        numbers = _numbers(ascending)
    else:
        loose = np.argsort(given)
        ascending = given[loose]
        numbers = _numbers(ascending)
        key = numbers << bits | loose
        key.sort()
        order = key & ((1 << bits) - 1)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return _Grouped(torch.from_numpy(ascending[firsts]), order, firsts, numbers)


def _numbers(ascending: Ids) -> Ids:
    """Return for each id how many different ones are before it."""
    numbers = np.zeros(len(ascending), np.int64)
    np.cumsum(ascending[1:] != ascending[:-1], out=numbers[1:])
    return numbers


def _array(tensor: Tensor) -> Any:
    """Return the tensor's memory as an array; a dtype that numpy lacks as bits of its size."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def is_whole(table: Table) -> bool:
    """Whether one server has all rows."""
    return len(table.heights) == 1


def check_rows(table: Table, ids: Tensor) -> None:
    """Raise FeedError if a row is not in a table that is cut into ranges."""
    if not are_within(ids, sum(table.heights)):
        given: Ids = ids.numpy()
        raise _outside(table, int(given.min()) if given.min() < 0 else int(given.max()))


def are_within(rows: Tensor, height: int) -> bool:
    """Whether rows, int64 of any shape, are all from 0 to `height` - 1. One pass: a negative one is large unsigned."""
    return not rows.numel() or int(rows.numpy().view(np.uint64).max()) < height


def _outside(table: Table, wrong: int) -> FeedError:
    height = sum(table.heights)
    return FeedError(f"id {wrong} is no row of the table {table.name!r}, which has {height}", variable=table.name)


def parts_of(table: Table, ids: Tensor) -> list[Part]:
    """Cut ascending different ids; a part that gets none has no rows. Raises FeedError for a row that is not there."""
    if not table.heights:
        return _spread(len(table.at), ids)
    ends = np.cumsum(table.heights)
    if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= ends[-1]):
        raise _outside(table, int(ids[0]) if int(ids[0]) < 0 else int(ids[-1]))
    cuts = [0, *(int(c) for c in np.searchsorted(ids.numpy(), ends))]
    firsts = [0, *(int(e) for e in ends[:-1])]
    return [Part(i, ids[cuts[i] : cuts[i + 1]] - first, slice(cuts[i], cuts[i + 1])) for i, first in enumerate(firsts)]


def _spread(num: int, ids: Tensor) -> list[Part]:
    if num == 1:
        return [Part(0, ids, slice(0, len(ids)))]
    owners: Any = server_of(ids.numpy(), num)
    positions = [torch.from_numpy(np.flatnonzero(owners == i)) for i in range(num)]
    return [Part(i, ids[p], p) for i, p in enumerate(positions)]
