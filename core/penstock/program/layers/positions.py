"""Parts of variables by position, and orders of their elements, under Fluid 1.8's names and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.creation import range as numbers
from penstock.program.layers.expected import expect_rank, refuse
from penstock.program.layers.sizes import sizes_in
from penstock.program.layers.tensor import fill_constant
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable


def flip(input: Any, dims: int | Sequence[int], name: str | None = None) -> Any:
    """Return the elements in the opposite order along `dims`."""
    return torch.flip(input, [dims] if isinstance(dims, int) else list(dims))


def roll(input: Any, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Any:
    """Return the elements moved on by `shifts` along `dims`, those at the end to the start; without `dims` in one
    line."""
    along = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    return torch.roll(input, (shifts,) if isinstance(shifts, int) else tuple(shifts), along)


def meshgrid(input: Sequence[Any], name: str | None = None) -> list[Any]:
    """Return the coordinates of a grid: the i-th result [n_0, n_1, …] varies along i as input[i] [n_i] does."""
    for axis in input:
        expect_rank("meshgrid", axis, 1)
    return list(torch.meshgrid(*input, indexing="ij"))


def index_select(input: Any, index: Any, dim: int = 0) -> Any:
    """Return the parts of `input` along `dim` at the positions `index`, int [k]."""
    expect_rank("index_select", index, 1)
    return torch.index_select(input, dim, index)


def index_sample(x: Any, index: Any) -> Any:
    """Return x[i, index[i, j]]. Shapes: x [n, m], index int [n, k]; result [n, k]."""
    expect_rank("index_sample", x, 2)
    expect_rank("index_sample", index, 2)
    return torch.gather(x, 1, index.long())


def scatter_nd_add(ref: Any, index: Any, updates: Any, name: str | None = None) -> Any:
    """Return `ref` with `updates` added at positions `index`; what has one position several times is added up.

    Shapes: index int [.., k] into the first k dimensions of ref, k a number; updates [.., the others of ref].
    """
    depth = index.desc.shape[-1] if index.ndim else None
    if not isinstance(depth, int) or depth > ref.ndim:
        refuse("scatter_nd_add", f"an index whose last size is a number of at most {ref.ndim}", index, "Reshape it")
    if not depth:
        return ref + updates.sum(list(range(index.ndim - 1)))
    return torch.index_put(ref, tuple(index.long().unbind(-1)), updates, accumulate=True)


def scatter_nd(index: Any, updates: Any, shape: Any, name: str | None = None) -> Any:
    """Return zeros of `shape` with `updates` added at positions `index`: see `scatter_nd_add`."""
    return scatter_nd_add(updates.new_zeros(sizes_in(shape)), index, updates)


def multiplex(inputs: Sequence[Any], index: Any) -> Any:
    """Return row i of inputs[index[i]] for each i. Shapes: inputs [n, …] each, index int [n, 1]; result [n, …]."""
    if len(inputs) < 2:
        raise ProgramError(f"{user_line()}: multiplex: inputs has {len(inputs)} variables; expected at least two")
    rows = torch.stack(list(inputs))
    chosen = index.long().reshape([1, -1, *[1] * (rows.ndim - 2)])
    return torch.gather(rows, 0, chosen.expand([1, *rows.shape[1:]])).squeeze(0)


def crop(x: Any, shape: Any = None, offsets: Any = None, name: str | None = None) -> Any:
    """Return the part of `shape` that starts at `offsets` (zeros): sizes, -1 for all that is left, or a variable that
    has this shape. `offsets` may be a variable, int [dimensions]."""
    if isinstance(shape, Variable):
        shape = list(shape.shape)
    return _cropped("crop", x, shape, offsets)


def crop_tensor(x: Any, shape: Any = None, offsets: Any = None, name: str | None = None) -> Any:
    """Return the part of `shape` that starts at `offsets` (zeros).

    `shape`: sizes as in `reshape`, -1 for all that is left. `offsets`: numbers and variables of one element, or a
    variable int [dimensions].
    """
    return _cropped("crop_tensor", x, None if shape is None else sizes_in(shape), offsets)


def _cropped(layer: str, x: Any, shape: Sequence[Any] | None, offsets: Any) -> Any:
    if shape is None or len(shape) != x.ndim:
        refuse(layer, f"a shape of as many sizes as x has dimensions; shape={shape}", x, "Use -1 for what is kept")
    starts = [0] * x.ndim if offsets is None else offsets
    starts = list(starts.unbind(0)) if isinstance(starts, Variable) else list(starts)
    if len(starts) != x.ndim:
        refuse(layer, f"an offset for each dimension; offsets={offsets}", x, "Use 0 for what starts where x does")
    with name_scope(default_main_program().unique(layer)):
        for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
            x = _narrowed(layer, x, axis, start, None if isinstance(size, int) and size == -1 else size)
        return x


def _narrowed(layer: str, x: Any, axis: int, start: Any, size: Any) -> Any:
    have = x.desc.shape[axis]
    if isinstance(start, Variable):
        if size is None:
            raise ProgramError(f"{user_line()}: {layer}: dimension {axis} has a variable offset, so give its size")
        steps = start.new_ones([size], dtype=torch.int64).cumsum(0) - 1
        return torch.index_select(x, axis, steps + start.long().reshape(1))
    if all(isinstance(v, int) for v in (have, start, size)) and not 0 <= start <= have - size:
        refuse(layer, f"{size} elements from {start} on along dimension {axis}", x, f"It has {have}")
    if size is None and start == 0:
        return x
    return x.narrow(axis, start, x.shape[axis] - start if size is None else size)


def pad_constant_like(x: Any, y: Any, pad_value: float = 0.0, name: str | None = None) -> Any:
    """Return y with `pad_value` behind it along each dimension, up to the sizes of x."""
    if x.ndim != y.ndim:
        refuse("pad_constant_like", f"as many dimensions as x, {x.ndim}", y, "Reshape it")
    missing = [large - small for large, small in zip(x.shape, y.shape, strict=True)]
    return F.pad(y, [n for size in reversed(missing) for n in (0, size)], value=pad_value)


def shard_index(input: Any, index_num: int, nshards: int, shard_id: int, ignore_value: int = -1) -> Any:
    """Return the positions in shard `shard_id` of ids, of which there are `index_num`; `ignore_value` for the ids of
    other shards."""
    if not 0 <= shard_id < nshards:
        raise ProgramError(f"{user_line()}: shard_index: shard_id is {shard_id}; expected 0 to {nshards - 1}")
    size = -(-index_num // nshards)
    return torch.where(input // size == shard_id, input % size, torch.full_like(input, ignore_value))


def rank(input: Any) -> Any:
    """Return how many dimensions a variable has, int32 [1]."""
    return fill_constant([1], "int32", input.ndim)


def size(input: Any) -> Any:
    """Return how many elements a variable has, int64 [1]. The batch is that of the replica."""
    return input.new_full([1], input.numel(), dtype=torch.int64)


def full(
    shape: Any,
    fill_value: float,
    out: Any = None,
    dtype: str | None = None,
    device: str | None = None,
    stop_gradient: bool = True,
    name: str | None = None,
) -> Any:
    """Return a variable of `fill_value`, of float32 by default; with `out`, fill it and return it."""
    return fill_constant(shape, dtype or "float32", fill_value, out=out)


def arange(start: float, end: float, step: float = 1, dtype: str | None = None, name: str | None = None) -> Any:
    """Return start, start + step, … below end, of float32 by default; see `range`."""
    return numbers(start, end, step, dtype or "float32")
