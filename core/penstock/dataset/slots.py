"""From a program's inputs to the columns of a line, and from a batch to a feed.

An input [batch, sizes…] is a slot of as many values a line as the sizes' product. With lod_level 1 a line has as many
values as it says: an input [rows, 1] is ragged, and fed the values as they were read, with `<name>@LENGTHS` int64
[batch, 1] beside them. An input [batch, -1] or [batch, -1, 1] is padded with zeros to the longest row's length rounded
up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: plans are made for sizes, and there are few of these; its lengths are fed
if the program asks (`layers.sequence_lengths`, `layers.sequence_pool`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import SpecError
from penstock.native import _feed

LENGTHS = "@LENGTHS"
_DTYPES = ("float32", "int64")


@dataclass(frozen=True, slots=True)
class Slot:
    """One column of a line. `width` 0: as many values as a line says. `sizes`: of a row in the feed, without these.

    `is_padded`: those of a line are a row of their own, not as many rows as they are.
    `hint`: what may be meant otherwise, for errors about its number of values; empty or a sentence.
    """

    name: str
    is_float: bool
    width: int
    sizes: tuple[int, ...]
    hint: str = ""
    is_padded: bool = True

    @property
    def native(self) -> _feed.Slot:
        """The slot as the parser takes it."""
        return (self.name, self.is_float, self.width)


def slots_of(variables: Iterable[Any]) -> tuple[Slot, ...]:
    """Return the slot of each variable, in their order. Raises SpecError (a ValueError) for one that cannot be read."""
    slots = tuple(_slot(variable) for variable in variables)
    names = [slot.name for slot in slots]
    if not slots or len(set(names)) != len(names):
        raise SpecError(f"set_use_var is given {names}; expected at least one input, each once", got=names)
    return slots


def _slot(variable: Any) -> Slot:
    desc = getattr(variable, "desc", None)
    if desc is None or not desc.feed:
        raise SpecError(f"set_use_var is given {variable!r}; expected inputs of the program (fluid.layers.data)")
    if desc.dtype not in _DTYPES:
        raise SpecError(
            f"set_use_var: input {desc.name!r} has dtype {desc.dtype!r}; data sets hold {' and '.join(_DTYPES)}",
            got=desc.dtype, expected=_DTYPES,
        )  # fmt: skip
    shape, is_float = list(desc.shape), desc.dtype == "float32"
    if variable.is_ragged:
        return _ragged_slot(desc, shape, is_float=is_float)
    if not shape or isinstance(shape[0], int):
        raise SpecError(f"set_use_var: input {desc.name!r} of shape {_text(shape)} has no batch (-1 comes first)")
    free = [i for i, size in enumerate(shape) if i and not isinstance(size, int)]
    if not free:
        sizes = tuple(int(size) for size in shape[1:])
        return Slot(desc.name, is_float, math.prod(sizes), sizes, _ragged_hint(desc, sizes))
    if free != [1] or desc.lod_level != 1 or any(size != 1 for size in shape[2:]):
        raise SpecError(
            f"set_use_var: input {desc.name!r} has shape {_text(shape)} and lod_level {desc.lod_level}. Lines of "
            "different length are read into [1], or padded into [-1, -1] (or [-1, -1, 1]), with lod_level=1; all other "
            "sizes are numbers",
            got=_text(shape),
        )
    return Slot(desc.name, is_float, 0, tuple(int(size) for size in shape[2:]))


def _ragged_slot(desc: Any, shape: list[Any], *, is_float: bool) -> Slot:
    if desc.lod_level != 1 or any(size != 1 for size in shape[1:]):
        raise SpecError(
            f"set_use_var: input {desc.name!r} has shape {_text(shape)} and lod_level {desc.lod_level}. Lines hold "
            "sequences of single values: [1] with lod_level=1",
            got=_text(shape),
        )
    return Slot(desc.name, is_float, 0, (1,) * (len(shape) - 1), is_padded=False)


def _ragged_hint(desc: Any, sizes: tuple[int, ...]) -> str:
    """Return why an input with a lod_level has one value a row all the same, if that is so."""
    if not desc.lod_level or sizes != (1,):
        return ""
    return (
        f"{desc.name!r} has lod_level={desc.lod_level}, but the program uses it together with what has one row a "
        "sample, so it has one value a row. For several, pool them first (layers.sequence_pool)"
    )


def _text(shape: Sequence[Any]) -> str:
    return f"[{', '.join(str(size) if isinstance(size, int) else '-1' for size in shape)}]"


def padded_length(longest: int) -> int:
    """Return the first of 1, 2, 3, 4, 6, 8, 12, … that is not below `longest`."""
    if longest <= 2:
        return max(longest, 1)
    power = 1 << ((longest - 1).bit_length() - 1)
    return power + power // 2 if longest <= power + power // 2 else 2 * power


def feed_of(batch: _feed.Batch, slots: Sequence[Slot], wanted: Set[str]) -> dict[str, torch.Tensor]:
    """Return the feed of a batch: the slots, and lengths of ragged ones, that are `wanted`.

    Dense slots are the batch's own memory, which lives as long as a tensor does.
    """
    feed: dict[str, torch.Tensor] = {}
    rows = len(batch)
    for i, slot in enumerate(slots):
        if slot.width:
            if slot.name in wanted:
                values = torch.from_numpy(batch.values(i, slot.width, slot.is_float))
                feed[slot.name] = values.view(rows, *slot.sizes)
            continue
        lengths = batch.lengths(i)
        if slot.name in wanted and not slot.is_padded:
            values = torch.from_numpy(batch.values(i, 0, slot.is_float))
            feed[slot.name] = values.view(-1, *slot.sizes)
        elif slot.name in wanted:
            width = padded_length(int(lengths.max()))
            padded = torch.from_numpy(batch.padded(i, width, slot.is_float))
            feed[slot.name] = padded.view(rows, width, *slot.sizes)
        if slot.name + LENGTHS in wanted:
            feed[slot.name + LENGTHS] = torch.from_numpy(lengths).view(rows, 1)
    return feed
