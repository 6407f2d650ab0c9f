"""Tensor arrays: a list of tensors inside blocks, one tensor without elements everywhere else.

A graph and its engine know tensors alone, of sizes that follow from the feeds, and an array has neither. Between
operators it is a tensor of shape [0] and the elements' dtype, over a storage that holds count, dtypes, sizes and values
of all elements: it may be passed on, but not copied. Writing and reading an array are operators of `penstock::control`,
each with the array after it as a result, so that every version of an array has one reader, and no two gradients of one
are ever added. An array that stands for one value of unknown sizes may have several; `penstock::add_arrays` adds those.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Element = Tensor | None
"""None: nothing was written at this position."""

_NOTHING = -1  # number of dimensions of an element that was not written
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


def packed(elements: Sequence[Element], dtype: torch.dtype) -> Tensor:
    """Return the tensor that holds an array. `dtype`: the tensor's; elements keep theirs. Cost: one copy of all."""
    words = [len(elements)]
    for one in elements:
        words += [_NOTHING] if one is None else [one.dim(), _DTYPES.index(one.dtype), *one.shape]
    parts = [torch.tensor([len(words), *words], dtype=torch.int64).view(torch.uint8)]
    held = [
        one.detach().cpu() for one in elements if one is not None and one.numel()
    ]  # an empty view keeps its strides
    parts += [one.reshape(-1).contiguous().view(torch.uint8) for one in held]
    whole = torch.cat(parts)
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), 0, torch.Size([0]), (1,))


def unpacked(array: Tensor) -> list[Element]:
    """Return the elements of an array, which share its memory."""
    storage = array.untyped_storage()
    if not storage.nbytes():
        return []
    data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, torch.Size([storage.nbytes()]), (1,))
    num_words = int(data[:8].view(torch.int64)[0])
    words = data[8 : 8 + 8 * num_words].view(torch.int64).tolist()
    found: list[Element] = []
    at, begin = 1, 8 + 8 * num_words
    for _ in range(words[0]):
        rank = words[at]
        if rank == _NOTHING:
            found.append(None)
            at += 1
            continue
        dtype, shape = _DTYPES[words[at + 1]], words[at + 2 : at + 2 + rank]
        end = begin + prod(shape) * dtype.itemsize
        found.append(data[begin:end].view(dtype).view(shape))
        at, begin = at + 2 + rank, end
    return found


def position(index: Tensor) -> int:
    """Return the position that an index variable of one element holds. Raises ValueError for a negative one."""
    found = int(index.item())
    if found < 0:
        raise ValueError(f"a tensor array has no position {found}")
    return found


def write(array: list[Element], index: Tensor, value: Tensor) -> None:
    """Put a value at a position, behind the end too."""
    at = position(index)
    array.extend([None] * (at + 1 - len(array)))
    array[at] = value.clone()


def read(array: list[Element], index: Tensor) -> Tensor:
    """Return the value at a position. Raises IndexError where nothing was written."""
    at = position(index)
    value = array[at] if at < len(array) else None
    if value is None:
        raise IndexError(f"the array has no value at {at}; it has {len(array)} positions")
    return value.clone()
