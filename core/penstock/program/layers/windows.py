"""Windows that convolutions and pools move over the dimensions behind batch and channels: sizes, steps and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.record.source import user_line

Size = int | Sequence[int]


def each(value: Size, count: int) -> list[int]:
    """Return a number for each of `count` dimensions, one for all of them if a single one is given."""
    return [int(value)] * count if isinstance(value, int) else [int(v) for v in value]


def number(x: Any, position: int, prefix: str, ndim: int = 4) -> int:
    """Return the size of x at `position`; refuse one that is not known, or other than `ndim` dimensions."""
    size = x.desc.shape[position] if x.ndim == ndim else None
    if not isinstance(size, int):
        words = {4: "four", 5: "five"}
        raise ProgramError(
            f"{user_line()}: {prefix}: input {x!r} must have {words[ndim]} dimensions and a known size at {position}"
        )
    return size


def padded(
    x: Any, padding: Size | str, kernel: list[int], stride: list[int], dilation: list[int], fill: float, prefix: str
) -> tuple[Any, list[int]]:
    """Return (x, padding that the kernel takes itself); uneven padding is recorded before it."""
    count = len(kernel)
    if isinstance(padding, str) and padding.upper() == "VALID":
        return x, [0] * count
    if isinstance(padding, str):
        if padding.upper() != "SAME":
            raise ProgramError(f"{user_line()}: {prefix}: padding is {padding!r}; expected numbers, 'SAME' or 'VALID'")
        reach = [(kernel[i] - 1) * dilation[i] + 1 for i in range(count)]
        sides = [_same(number(x, 2 + i, prefix, 2 + count), stride[i], reach[i]) for i in range(count)]
    else:
        sides = _sides(padding, count, prefix)
    if all(low == high for low, high in sides):
        return x, [low for low, _ in sides]
    return F.pad(x, [n for side in reversed(sides) for n in side], value=fill), [0] * count


def _sides(padding: Size, count: int, prefix: str) -> list[tuple[int, int]]:
    sizes = each(padding, count)
    if len(sizes) == count:
        return [(size, size) for size in sizes]
    if len(sizes) != 2 * count:
        words = {2: "two or four", 3: "three or six"}
        raise ProgramError(f"{user_line()}: {prefix}: padding is {padding}; expected a number, {words[count]} of them")
    return list(zip(sizes[::2], sizes[1::2], strict=True))


def _same(size: int, stride: int, reach: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2
