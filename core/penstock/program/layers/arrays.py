"""Tensor arrays: lists of tensors that are written and read at positions which are values of the program.

Elements that are read have one dtype and rank; sizes in which they differ follow from data where one is read. Rows may
differ in a loop: what is read there has a number of rows of its own, which turns out, at the loop's end, to be that of
the first element, if all that was written has as many (`settle`). Source: array_write, array_read, array_length,
create_array, tensor_array_to_tensor (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from penstock.errors import ArgumentError, ProgramError
from penstock.program.expr import Dim, Expr, renamed
from penstock.program.record import arithmetic
from penstock.program.record.arrays import TensorArray, append, in_block, new_array
from penstock.program.record.blocks import OpenBlock
from penstock.program.record.context import default_main_program
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.ragged import rename_symbols
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line
from penstock.program.record.unsized import read_all, read_element, sized_in_block
from penstock.program.record.variable import Variable, dtype_named
from penstock.program.sequences import lengths_of


def create_array(dtype: Any) -> TensorArray:
    """Return an empty array of elements of a dtype."""
    return new_array(recording_of(default_main_program()), dtype_named(dtype))


def array_write(x: Any, i: Any, array: Any = None) -> Any:
    """Put a copy of x at position `i` (int64, one element) of an array, a new one by default, and return the array.

    Elements that are written in a loop have one dtype and shape, but for their rows; where others differ in dtype or
    number of dimensions, the array can be fetched alone. All have sequences, if the first one that is written has them.
    Raises ProgramError for others.
    """
    array = create_array(x.dtype) if array is None else _expect(array, "array_write")
    recording = recording_of(default_main_program())
    own = recording.own(array)
    _expect_index(i, "array_write")

    def write() -> None:
        value = recording.own(read_all(recording, x))
        levels = [recording.handles[name] for name in _levels_of(recording, value)]
        if own.sizes is None:
            own.levels = [_beside(recording, own) for _ in levels]
        elif own.levels and len(levels) != len(own.levels):
            raise ProgramError(
                f"{user_line()}: array_write puts {value!r} with {len(levels)} levels of sequences into an array of "
                f"elements with {len(own.levels)}. Give it sequences (layers.lod_reset)",
                variable=value.name,
            )
        parts = [(own, value), *(zip(own.levels, levels, strict=True) if own.levels else ())]
        for one, written in parts:
            _write(recording, one, i, written)

    sized_in_block(recording, write)
    return array


def _levels_of(recording: Recording, value: Variable) -> list[str]:
    return lengths_of(recording.program, value.desc.shape[0]) if value.desc.shape else []


def _beside(recording: Recording, array: TensorArray) -> TensorArray:
    """An array of lengths, made where `array` is."""
    with ExitStack() as stack:
        for block in reversed(list(recording.open_blocks)):
            if block.makes(array.name):
                break
            stack.enter_context(block.outside())
        return new_array(recording, torch.int64)


def _write(recording: Recording, array: TensorArray, i: Any, value: Variable) -> None:
    sizes = list(value.fake.shape)
    old = None if array.sizes is None else _dims(recording, array.sizes)
    new = _dims(recording, sizes)
    loop = _loop_around(recording, array)
    differs = array.dtype != value.dtype or (old is not None and len(old) != len(new))
    if loop is not None and (differs or (old is not None and not _fits(old, new, array.varying))):
        raise ProgramError(
            f"{user_line()}: array_write puts {value!r} into an array of {array.dtype} {old}; elements that "
            "are written in a loop have one dtype and shape, but for their rows",
            variable=value.name,
        )
    array.is_mixed = array.is_mixed or differs
    if old is not None and not differs:
        array.varying |= {at for at, (one, this) in enumerate(zip(old, new, strict=True)) if at and one != this}
    if loop is not None:
        loop.late_writes.append((array, value.name))
    elif old is not None and old != new and not differs:
        array.varies = True
    array.sizes = sizes if array.sizes is None else array.sizes
    in_block(recording, lambda: append(recording, "array_write", (array, i, value), writes=True))


def _fits(old: Sequence[Dim], new: Sequence[Dim], varying: frozenset[int]) -> bool:
    """Whether elements have one shape, but for their rows and the `varying` sizes."""
    return all(at == 0 or at in varying or old[at] == size for at, size in enumerate(new))


def _dims(recording: Recording, sizes: Sequence[Any]) -> list[Dim]:
    return [recording.symbols.dim(size) for size in sizes]


def _loop_around(recording: Recording, array: TensorArray) -> OpenBlock | None:
    """The innermost open loop that an array is from outside of."""
    for block in reversed(recording.open_blocks):
        if block.makes(array.name):
            return None
        if block.repeats:
            return block  # type: ignore[no-any-return]  # an OpenBlock
    return None


def array_read(array: Any, i: Any) -> Any:
    """Return the element at position `i` (int64, one element). Raises ProgramError for an array without elements."""
    recording = recording_of(default_main_program())
    own = recording.own(_expect(array, "array_read"))
    _refuse_mixed(own, "array_read")
    _expect_index(i, "array_read")
    if own.sizes is None:
        raise ProgramError(f"{user_line()}: array_read: nothing was written to {own.name!r}, so its shape is unknown")

    def sizes_of(one: TensorArray) -> list[Any]:
        return _sizes_to_read(recording, one)

    return sized_in_block(recording, lambda: read_element(recording, own, "array_read", (i,), sizes_of))


def _sizes_to_read(recording: Recording, array: TensorArray) -> list[Any]:
    sizes = [recording.symbols.new_of_data() if at in array.varying else s for at, s in enumerate(array.sizes or ())]
    if array.varies:
        return [recording.symbols.new_of_data(), *sizes[1:]]
    loop, rows = _loop_around(recording, array), array.rows
    if loop is None or not isinstance(rows, Expr) or rows.op != "sym":
        return sizes
    late = recording.symbols.new_of_data()
    loop.late_reads.append((array, str(recording.symbols.dim(late)), str(rows)))
    return [late, *sizes[1:]]


def settle(recording: Recording, block: OpenBlock) -> None:
    """At the end of a loop, find out which arrays have elements of different rows; the others' rows are the first's."""
    varying: set[str] = set()
    while True:
        same, found = _first_rows(recording, block, varying)
        found |= {
            array.name for array, name in block.late_writes
            if array.name not in varying and _rows_of(recording, name, same) != array.rows
        }  # fmt: skip
        if not found:
            break
        varying |= found
    rename_symbols(recording, same)
    for array in {id(entry[0]): entry[0] for entry in block.late_writes}.values():
        array.varies = array.varies or array.name in varying
        outer = _loop_around(recording, array)
        if outer is not None:
            outer.late_writes += [entry for entry in block.late_writes if entry[0] is array]


def _first_rows(recording: Recording, block: OpenBlock, varying: set[str]) -> tuple[dict[str, str], set[str]]:
    """The symbols of rows that were read -> those of the first elements; and the arrays that contradict that."""
    equal, of_data = recording.symbols.sizes.equal, recording.symbols.of_data
    reads = [
        (array.name, str(equal.get(late, late)), str(equal.get(first, first)))
        for array, late, first in block.late_reads
    ]
    different = {now for name, now, _ in reads if name in varying}
    same: dict[str, str] = {}
    found: set[str] = set()
    for name, now, first in reads:
        if name in varying or now == first:
            continue
        if now not in of_data or now in different or same.setdefault(now, first) != first:
            found.add(name)
    return same, found


def _rows_of(recording: Recording, name: str, same: dict[str, str]) -> Dim | None:
    shape = recording.program.variables[name].shape
    return arithmetic.of_dim(renamed(shape[0], same)).dim if shape else None


def array_length(array: Any) -> Any:
    """Return the number of positions, int64 [1]."""
    recording = recording_of(default_main_program())
    own = recording.own(_expect(array, "array_length"))
    made = in_block(recording, lambda: append(recording, "array_length", (own,), [empty_fake([1], None, torch.int64)]))
    return recording.handle(made[0])


def tensor_array_to_tensor(
    input: Any, axis: int = 1, name: str | None = None, use_stack: bool = False
) -> tuple[Any, Any]:
    """Return all elements of an array in one tensor, one behind the other along `axis`, and the size of each there.

    `use_stack`: side by side, along a new dimension. How many there are follows from data: what is returned is known
    when it is fetched, and calls on it are recorded as usual. Shapes: int32 [elements] for the sizes.
    """
    recording = recording_of(default_main_program())
    own = recording.own(_expect(input, "tensor_array_to_tensor"))
    if own.sizes is None:
        raise ProgramError(f"{user_line()}: tensor_array_to_tensor: nothing was written to {own.name!r}")
    _refuse_mixed(own, "tensor_array_to_tensor")
    rank = len(own.sizes) + use_stack
    if not -rank <= axis < rank:
        raise ProgramError(f"{user_line()}: tensor_array_to_tensor: axis is {axis}; elements have {len(own.sizes)}")

    def join() -> tuple[Any, Any]:
        count = recording.symbols.new_of_data()
        whole = _sizes_to_read(recording, own)
        sizes = [*whole[: axis % rank], count, *whole[axis % rank + (not use_stack) :]]
        elements = count if use_stack else recording.symbols.new_of_data()
        fakes = [empty_fake(sizes, None, own.dtype), empty_fake([elements], None, torch.int32)]
        found = append(recording, "array_joined", (own, axis % rank, bool(use_stack)), fakes)
        both = [recording.handle(recording.tensor_of(one)) for one in found]
        return both[0], both[1]

    return sized_in_block(recording, join)  # type: ignore[no-any-return]  # what join returns


def _refuse_mixed(array: TensorArray, what: str) -> None:
    if array.is_mixed:
        raise ProgramError(
            f"{user_line()}: {what}: elements of {array.name!r} differ in dtype or number of dimensions, so those of "
            "one are not known before a run. Fetch the array, or use one for each kind",
            variable=array.name,
        )


def _expect(array: Any, what: str) -> TensorArray:
    if not isinstance(array, TensorArray):
        raise ArgumentError(f"{user_line()}: {what} needs an array (layers.create_array), got {array!r}")
    return array


def _expect_index(i: Any, what: str) -> None:
    if not isinstance(i, Variable) or i.dtype not in (torch.int64, torch.int32) or any(d != 1 for d in i.desc.shape):
        raise ArgumentError(f"{user_line()}: {what} needs an int64 variable of one element as position, got {i!r}")
