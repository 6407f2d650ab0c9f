"""Variables from numbers, arrays and other variables, and in other shapes; parameters and global state by hand."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ArgumentError, ProgramError
from penstock.program.initializers import Constant, Initializer
from penstock.program.layers.activations import activate
from penstock.program.layers.sizes import sizes_in
from penstock.program.record.arrays import TensorArray, copied
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared import Declared, written
from penstock.program.record.opening import recording_of
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named, recording_modes, wrap
from penstock.program.training import parameters
from penstock.program.training.parameters import ParamAttr


def create_parameter(
    shape: Sequence[int],
    dtype: str,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Initializer | None = None,
) -> Variable:
    """Create a parameter; it starts as Xavier's, or at zero if `is_bias`.

    Raises ArgumentError for sizes that are no whole numbers and for what is no initializer.
    """
    _expect_sizes("create_parameter", shape, dtype)
    if default_initializer is not None and not hasattr(default_initializer, "operator"):
        raise ArgumentError(
            f"{user_line()}: create_parameter: default_initializer is {default_initializer!r}; expected one of "
            "fluid.initializer, such as Constant(0.0)"
        )
    wanted = ParamAttr.of(attr) or ParamAttr()
    default = default_initializer or (Constant(0.0) if is_bias else None)
    prefix = default_main_program().unique("create_parameter") if name is None else name
    if name is not None and wanted.name is None:
        wanted = copy.copy(wanted)
        wanted.name = name
    return parameters.create_parameter(shape, dtype, wanted, default, prefix=prefix, suffix="w_0")


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: str,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Variable:
    """Create a variable that starts as `value`: with `persistable` state that lives on between runs, which the startup
    program fills; else one that each run makes anew. Raises ArgumentError for sizes that are no whole numbers."""
    _expect_sizes("create_global_var", shape, dtype)
    if not persistable:
        made: Variable = fill_constant(shape, dtype, value)
        if name is not None:
            recording = recording_of(default_main_program())
            rename_recorded(recording, made.fake, name)
        return made
    first = _number("create_global_var", value)
    return parameters.constant_state(name or default_main_program().unique("global_var"), first, dtype, shape)


def _number(layer: str, value: Any) -> Any:
    """Return the number that an array of one element has, or the value itself. Raises ArgumentError for more."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size != 1:
        raise ArgumentError(f"{user_line()}: {layer}: value has the shape {value.shape}; expected one number")
    return value.item()


def _expect_sizes(layer: str, shape: Any, dtype: Any) -> None:
    """Raise ArgumentError for sizes of a variable that are no whole numbers, ProgramError for a complex dtype."""
    is_number = isinstance(shape, (int, float))
    sizes = () if is_number or isinstance(shape, Variable) else shape
    if is_number or any(isinstance(size, (float, np.floating)) for size in sizes):
        raise ArgumentError(f"{user_line()}: {layer}: shape is {shape!r}; expected a list of whole numbers")
    if dtype_named(dtype).is_complex:
        raise ProgramError(f"{user_line()}: {layer}: dtype is {dtype!r}; expected real or whole numbers, or bool")


def fill_constant(
    shape: Any,
    dtype: str | torch.dtype,
    value: Any,
    force_cpu: bool = False,
    out: Any = None,
    name: str | None = None,
) -> Any:
    """Return a variable in which every element is `value`, a number or a variable of one; with `out`, fill it.

    `shape`: ints and elements of `layers.shape(x)`, or a variable of such.
    """
    if isinstance(value, Variable):
        made = value.reshape([1]).to(dtype_named(dtype)).expand(sizes_in(shape)).clone()
        return made if out is None else assign(made, out)
    value = _number("fill_constant", value)
    if out is not None and not isinstance(out, Declared):
        return out.fill_(value)
    recording = recording_of(default_main_program())
    with name_scope(name or default_main_program().unique("fill_constant")), recording_modes(recording):
        kind = dtype_named(dtype)
        number = value if kind.is_floating_point else int(value)
        made = wrap(recording, torch.full(sizes_in(shape), number, dtype=kind))
        return made if out is None else written(out, made)


def assign(input: Any, output: Any = None) -> Any:
    """Return a copy of a variable, or a variable that holds an array; with `output`, write there and return it.

    Of a tensor array it is one, too. Raises ProgramError for an `output` that is none then.
    """
    if isinstance(input, TensorArray) and input.desc.kind == "array":
        return copied(input, output)
    if isinstance(input, Variable):
        made: Any = torch.clone(input)  # type: ignore[arg-type]  # a Variable
        return made if output is None else written(output, made)
    recording = recording_of(default_main_program())
    array = torch.from_numpy(np.array(input))
    with recording_modes(recording):
        value = wrap(recording, recording.capture(array).clone())
    return value if output is None else written(output, value)


def cast(x: Any, dtype: Any) -> Any:
    """Return x as another dtype."""
    return x.to(dtype_named(dtype))


def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """Return float32 rows with a 1 at the id. Shapes: int64 [n, 1]; result [n, depth].

    An id outside [0, depth) gives a row of zeros, as Fluid does with allow_out_of_range=True.
    """
    with name_scope(default_main_program().unique("one_hot")):
        ids = input if input.desc.shape[-1] == 1 else input.unsqueeze(-1)
        with recording_modes(input._recording):
            columns = wrap(input._recording, torch.arange(depth))
        return (ids == columns).to(torch.float32)


def topk(input: Any, k: int, name: str | None = None) -> tuple[Any, Any]:
    """Return (values, int64 indices) of the k largest along the last dimension, largest first."""
    values, indices = torch.topk(input, k, -1)
    return values, indices


def argmax(x: Any, axis: int = 0) -> Any:
    """Return the int64 position of the largest along `axis`."""
    return torch.argmax(x, axis)


def concat(input: Sequence[Any], axis: int = 0, name: str | None = None) -> Any:
    """Concatenate along `axis`; what has no dimensions, a sum say, counts as one element.

    Fluid compares no more dimensions than the first input has: ones behind these are dropped from the others.
    """
    with name_scope(name or default_main_program().unique("concat")):
        first, *others = [x if x.ndim else x.reshape([1]) for x in input]
        return torch.cat([first, *(_without_ones_behind(x, first.ndim) for x in others)], axis)


def _without_ones_behind(x: Any, dims: int) -> Any:
    behind = x.desc.shape[dims:] if isinstance(x, Variable) else x.shape[dims:]
    return x.flatten(dims - 1) if behind and all(size == 1 for size in behind) else x


def reshape(
    x: Any,
    shape: Any,
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Any:
    """Return x in another shape: 0 keeps the size at its position, one -1 is whatever is left.

    `shape`: ints and elements of `layers.shape(x)`, or a variable of such.
    """
    if actual_shape is not None:
        raise ProgramError(
            f"{user_line()}: reshape(actual_shape=) asks for sizes that depend on data; give them in `shape`"
        )
    with name_scope(name or default_main_program().unique("reshape2")):
        sizes = [x.shape[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(sizes_in(shape))]
        return activate(x.reshape(sizes), act)


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


def slice(input: Any, axes: Sequence[int], starts: Any, ends: Any) -> Any:
    """Return input[starts[i]:ends[i]] along each of `axes`.

    `starts`, `ends`: numbers and variables with one element, or a variable that has one element for each axis. They
    may be sizes, as in `reshape`, or both follow from one variable (`[i]`, `[i + 1]`).
    """
    for axis, start, end in zip(axes, _bounds(starts), _bounds(ends), strict=True):
        index: list[Any] = [builtins.slice(None)] * input.ndim
        index[axis] = builtins.slice(start, end)
        input = input[tuple(index)]
    return input


def _bounds(given: Any) -> list[Any]:
    """A bound for each axis: the elements of a variable, or those of a list."""
    if isinstance(given, Variable):
        return [given] if all(size == 1 for size in given.desc.shape) else sizes_in(given)
    return list(given)


def expand(x: Any, expand_times: Any, name: str | None = None) -> Any:
    """Repeat x so many times along each dimension; these may be sizes, as in `reshape`."""
    return x.repeat(sizes_in(expand_times))
