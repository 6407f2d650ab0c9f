"""What operators do that only blocks have: with tensor arrays as lists, and with results of unknown sizes.

`run` calls one by its type. A kernel that changes an array changes the list that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.program.control import arrays, beam_search, detections, matching, ranked, suppression
from penstock.program.control.arrays import Element

_Kernel = Callable[..., tuple[Any, ...]]


def _write(array: list[Element], index: Tensor, value: Tensor) -> tuple[()]:
    arrays.write(array, index, value)
    return ()


def _assign(array: list[Element], other: list[Element]) -> tuple[()]:
    array[:] = other
    return ()


def _joined(array: list[Element], axis: int, is_stacked: bool) -> tuple[Tensor, Tensor]:
    """All elements in one tensor, and the size of each along `axis`."""
    missing = [number for number, one in enumerate(array) if one is None]
    if missing or not array:
        raise ValueError(f"the array has {len(array)} positions, and no value at {missing or 'any of them'}")
    elements = [one for one in array if one is not None]
    whole = torch.stack(elements, axis) if is_stacked else torch.cat(elements, axis)
    sizes = [one.shape[axis] if axis < one.dim() else 1 for one in elements]
    return whole, torch.tensor(sizes, dtype=torch.int32)


def _rows_with_lengths(x: Tensor, lengths: Tensor) -> tuple[Tensor]:
    """The rows of x, which the lengths of sequences have to add up to."""
    if int(lengths.sum()) != x.shape[0] or bool((lengths < 0).any()):
        raise ValueError(f"the lengths {lengths.reshape(-1).tolist()} do not add up to the {x.shape[0]} rows")
    return (x.clone(),)


def _rows_between(starts: Tensor, lengths: Tensor, ends: Tensor) -> tuple[Tensor]:
    """The positions start, start + 1, … of each pair, `length` of them, all below the end."""
    counts = lengths.reshape(-1)
    wrong = (counts < 0) | (starts.reshape(-1) + counts > ends.reshape(-1))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(counts[at])} rows from {int(starts.reshape(-1)[at])} on are asked for of the sequence {at}, which "
            f"ends at {int(ends.reshape(-1)[at])}"
        )
    first = counts.cumsum(0) - counts
    shift = torch.repeat_interleave(starts.reshape(-1) - first, counts)
    return (torch.arange(shift.numel()) + shift,)


def _rows_repeated(x: Tensor, counts: Tensor) -> tuple[Tensor]:
    """Row i of x as often as counts[i] says."""
    return (torch.repeat_interleave(x, counts.reshape(-1), 0),)


def _rows_unique(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The different values of x in the order in which they come first, the position of each of x's among them, counts.

    `kind`: the dtype of positions and counts.
    """
    values, where, counts = torch.unique(x, return_inverse=True, return_counts=True)
    first = torch.full(values.shape, x.numel()).scatter_reduce_(0, where, torch.arange(x.numel()), "amin")
    order = torch.argsort(first)
    rank, dtype = torch.argsort(order), getattr(torch, kind)
    return values[order], rank[where].to(dtype), counts[order].to(dtype)


_KERNELS: dict[str, _Kernel] = {
    "penstock.array_new": lambda: ([],),
    "penstock.array_of": lambda value: ([value.clone()],),
    "penstock.array_write": _write,
    "penstock.array_assign": _assign,
    "penstock.array_read": lambda array, index: (arrays.read(array, index),),
    "penstock.array_first": lambda array: (arrays.read(array, torch.zeros(1, dtype=torch.int64)),),
    "penstock.array_length": lambda array: (torch.tensor([len(array)]),),
    "penstock.array_joined": _joined,
    "penstock.array_of_steps": ranked.to_steps,
    "penstock.rows_of_steps": ranked.from_steps,
    "penstock.rows_lasting": ranked.lasting,
    "penstock.rows_with_lengths": _rows_with_lengths,
    "penstock.rows_between": _rows_between,
    "penstock.rows_repeated": _rows_repeated,
    "penstock.rows_counted": lambda value: (torch.arange(int(value)),),
    "penstock.rows_true": lambda condition: (condition.nonzero(),),
    "penstock.rows_unique": _rows_unique,
    "penstock.rows_matched": matching.matched,
    "penstock.rows_kept": suppression.kept,
    "penstock.rows_judged": detections.judged,
    "penstock.rows_averaged": detections.averaged,
    "penstock.beam_search": beam_search.step,
    "penstock.beam_search_decode": beam_search.sentences,
}


def run(kind: str, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operator of `kernels.ARRAY_OPERATORS`."""
    return _KERNELS[kind](*operands)
