"""`penstock.sample_tree`: nodes of a tree of items for training one classifier a level, as TDM does.

    sample_tree(Tensor items, Tensor paths, Tensor levels, Tensor numbers, int[] negatives, int[] sizes, bool positive)
        -> (Tensor nodes, Tensor labels, Tensor mask)

`items` int [n]; `paths` int [items, levels], the node of each level above an item, 0 where it has none; `levels` int
[sum of sizes], the nodes of one level after another; `numbers` float64 [n, `num_numbers(negatives)`] in [0, 1), by
which nodes are drawn. For each level the item's node (with `positive`) and `negatives[level]` others, different ones
and each as likely, come beside each other: int [n, columns]. Labels are 1 for the item's node. Where the item has none,
nodes, labels and mask are 0; the mask is 1 else. No derivative.
Source: tdm_sampler_op.h (Fluid 1.8), which draws until it has as many; here Floyd's algorithm does, by a fixed number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define(
    "sample_tree(Tensor items, Tensor paths, Tensor levels, Tensor numbers, int[] negatives, int[] sizes, "
    "bool positive) -> (Tensor, Tensor, Tensor)"
)


def num_numbers(negatives: Sequence[int]) -> int:
    """How many random numbers an item needs: for each node, for one that may be its own, and to leave one out."""
    return sum(num + 2 for num in negatives if num)


def _distinct(numbers: Tensor, below: int) -> Tensor:
    """Different positions below a number, one for each column of numbers, int64 [n, k]: Floyd's algorithm."""
    rows, num = numbers.shape
    chosen = torch.full([rows, num], -1, dtype=torch.int64, device=numbers.device)
    for column in range(num):
        last = below - num + column
        drawn = (numbers[:, column] * (last + 1)).to(torch.int64).clamp_(max=last)
        is_taken = (chosen[:, :column] == drawn[:, None]).any(1)
        chosen[:, column] = torch.where(is_taken, last, drawn)
    return chosen


def _others(own: Tensor, nodes: Tensor, numbers: Tensor) -> Tensor:
    """Different nodes other than each row's own: one more than needed are drawn, and its own, or any, is left out."""
    num = numbers.shape[1] - 2
    drawn = nodes[_distinct(numbers[:, : num + 1], len(nodes))]
    is_own = drawn == own[:, None]
    any_one = (numbers[:, num + 1] * (num + 1)).to(torch.int64).clamp_(max=num)
    left_out = torch.where(is_own.any(1), is_own.to(torch.uint8).argmax(1), any_one)
    columns = torch.arange(num, device=own.device)[None, :]
    return drawn.gather(1, columns + (columns >= left_out[:, None]))


def _sample_tree(
    items: Tensor,
    paths: Tensor,
    levels: Tensor,
    numbers: Tensor,
    negatives: Sequence[int],
    sizes: Sequence[int],
    positive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Raises ValueError for an item that has no path."""
    wrong = ((items < 0) | (items >= len(paths))).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"penstock.sample_tree: item {int(items[row])} at row {row}; expected 0 to {len(paths) - 1}, one of the "
            "leaves of the tree"
        )
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    first, used = 0, 0
    for level, (num, size) in enumerate(zip(negatives, sizes, strict=True)):
        own = paths[items, level]
        if positive:
            parts.append(_part(own[:, None], own, 1))
        if num:
            others = _others(own, levels[first : first + size], numbers[:, used : used + num + 2])
            parts.append(_part(others, own, 0))
        first, used = first + size, used + (num + 2 if num else 0)
    nodes, labels, mask = (torch.cat(one, 1) for one in zip(*parts, strict=True))
    return nodes, labels, mask


def _part(nodes: Tensor, own: Tensor, label: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes with their labels and mask: 0 in rows of items that have no node of this level."""
    is_padding, one = (own == 0)[:, None], torch.ones_like(nodes)
    nodes, labels, mask = (x.masked_fill(is_padding, 0) for x in (nodes, one * label, one))
    return nodes, labels, mask


def _shape(
    items: Tensor,
    paths: Tensor,
    levels: Tensor,
    numbers: Tensor,
    negatives: Sequence[int],
    sizes: Sequence[int],
    positive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = sum(negatives) + len(negatives) * positive
    return tuple(paths.new_empty([items.shape[0], columns]) for _ in range(3))  # type: ignore[return-value]  # three


_LIBRARY.impl("sample_tree", _sample_tree, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::sample_tree", _shape, lib=_LIBRARY)
