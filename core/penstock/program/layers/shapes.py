"""Shapes: what changes how elements are arranged, not what they are."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.activations import activate
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line


def concat(input: Sequence[Any], axis: int = 0, name: str | None = None) -> Any:
    """Concatenate along `axis`."""
    with name_scope(name or default_main_program().unique("concat")):
        return torch.cat(list(input), axis)


def reshape(
    x: Any,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Any:
    """Return x in another shape: 0 keeps the size at its position, one -1 is whatever is left."""
    if actual_shape is not None:
        raise ProgramError(
            f"{user_line()}: reshape(actual_shape=) asks for sizes that depend on data; give them in `shape`"
        )
    with name_scope(name or default_main_program().unique("reshape")):
        return activate(x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)]), act)


def transpose(x: Any, perm: Sequence[int], name: str | None = None) -> Any:
    """Return x with its dimensions in the order `perm`."""
    return x.permute(list(perm))


def squeeze(input: Any, axes: Sequence[int], name: str | None = None) -> Any:
    """Drop dimensions of size 1: those in `axes`, or all if it is empty."""
    return input.squeeze(tuple(axes)) if axes else input.squeeze()


def unsqueeze(input: Any, axes: int | Sequence[int], name: str | None = None) -> Any:
    """Put dimensions of size 1 at `axes`, one after another."""
    for axis in [axes] if isinstance(axes, int) else axes:
        input = input.unsqueeze(axis)
    return input


def flatten(x: Any, axis: int = 1, name: str | None = None) -> Any:
    """Return a matrix: dimensions before `axis` are its rows, the others its columns."""
    with name_scope(name or default_main_program().unique("flatten")):
        if axis == 0:
            return x.reshape([1, -1])
        rows = x.flatten(0, axis - 1) if axis > 1 else x
        return rows.unsqueeze(1) if rows.ndim == 1 else rows if rows.ndim == 2 else rows.flatten(1)


def split(input: Any, num_or_sections: int | Sequence[int], dim: int = -1, name: str | None = None) -> list[Any]:
    """Split along `dim` into so many equal parts, or into parts of the given sizes (one may be -1)."""
    size = input.desc.shape[dim]
    if not isinstance(size, int):
        raise ProgramError(
            f"{user_line()}: split: size {size} of {input.name!r} along {dim} is not known; split another dimension"
        )
    if isinstance(num_or_sections, int):
        if size % num_or_sections:
            raise ProgramError(
                f"{user_line()}: split: {size} does not divide into {num_or_sections} equal parts of {input.name!r}"
            )
        sections = [size // num_or_sections] * num_or_sections
    else:
        known = [s for s in num_or_sections if s >= 0]
        sections = [s if s >= 0 else size - sum(known) for s in num_or_sections]
    return list(torch.split(input, sections, dim))


def stack(x: Any, axis: int = 0) -> Any:
    """Return variables of one shape along a new dimension."""
    return torch.stack(list(x) if isinstance(x, (list, tuple)) else [x], axis)


def slice(input: Any, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Any:
    """Return input[starts[i]:ends[i]] along each of `axes`."""
    for axis, start, end in zip(axes, starts, ends, strict=True):
        index: list[Any] = [builtins.slice(None)] * input.ndim
        index[axis] = builtins.slice(start, end)
        input = input[tuple(index)]
    return input


def expand(x: Any, expand_times: Sequence[int], name: str | None = None) -> Any:
    """Repeat x so many times along each dimension."""
    return x.repeat(list(expand_times))
