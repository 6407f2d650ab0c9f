"""Tensor arrays: lists of tensors that are written and read at positions which are values of the program.

Source: array_write, array_read, array_length, create_array (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.record.blocks import recorded_block, run_once
from penstock.program.record.context import current_role, default_main_program
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named


class TensorArray(Variable):
    """The handle of an array. `sizes`: those of its elements, once one was written."""

    sizes: Sequence[Any] | None = None

    def for_recording(self, recording: Recording) -> Variable:
        """Return the handle of the same array in a clone of its Program."""
        copy = TensorArray(recording, self.name, self.fake)
        copy.sizes = self.sizes
        return copy


def _append(recording: Recording, kind: str, operands: Sequence[Variable], made: torch.Tensor | None = None) -> str:
    """Append an operator on arrays to the block that is recorded; return the name of its result."""
    program = recording.program
    name = program.unique_operator(f"array_{kind}")
    source, outputs = user_line(), ()
    args: tuple[Arg, ...] = tuple(Ref(recording.own(v).name) for v in operands)
    if made is not None:
        recording.bind(made, recording.describe(made, f"{name}.tmp_0"))
        recording.handle(made)
    writes = (recording.own(operands[0]).name,) if kind == "write" else ()
    names = () if made is None else (f"{name}.tmp_0",)
    role, _ = current_role()
    program.append(
        Operator(name, f"penstock.array_{kind}", args, names or outputs, writes=writes, role=role,
                 module=recording.module_path(), source=source)
    )  # fmt: skip
    return f"{name}.tmp_0" if made is not None else ""


def _in_block(recording: Recording, append: Callable[[], str]) -> torch.Tensor | None:
    """Append an operator on arrays to the open block, or to one of its own; return its result."""
    if recording.open_blocks:
        name = append()
        return recording.tensor_of(name) if name else None
    with recorded_block(recording) as block:
        name = append()
        recorded = block.close([name] if name else [])
    found = run_once(recording, recorded, [name] if name else [])
    return found[0] if found else None


def create_array(dtype: Any) -> TensorArray:
    """Return an empty array of elements of a dtype."""
    recording = recording_of(default_main_program())
    kind = dtype_named(dtype)

    def append() -> str:
        name = _append(recording, "new", (), empty_fake([0], None, kind))
        recording.program.variables[name] = replace(recording.program.variables[name], kind="array")
        return name

    made = _in_block(recording, append)
    assert made is not None
    name = recording.name_of(made)
    recording.program.variables[name] = replace(recording.program.variables[name], kind="array")
    array = TensorArray(recording, name, made)
    recording.handles[name] = array
    return array


def array_write(x: Any, i: Any, array: Any = None) -> Any:
    """Put a copy of x at position `i` (int64, one element) of an array, a new one by default, and return the array.

    All elements have one shape and dtype. Raises ProgramError for others.
    """
    array = create_array(x.dtype) if array is None else _expect(array, "array_write")
    recording = recording_of(default_main_program())
    own, value = recording.own(array), recording.own(x)
    _expect_index(i, "array_write")
    sizes = list(value.fake.shape)
    if own.dtype != value.dtype or (own.sizes is not None and [str(n) for n in own.sizes] != [str(n) for n in sizes]):
        raise ProgramError(
            f"{user_line()}: array_write puts {value!r} into an array of {own.dtype} {own.sizes}; all elements of an "
            "array have one shape and dtype",
            variable=value.name,
        )
    own.sizes = sizes
    _in_block(recording, lambda: _append(recording, "write", (own, i, value)))
    return array


def array_read(array: Any, i: Any) -> Any:
    """Return the element at position `i` (int64, one element). Raises ProgramError for an array without elements."""
    recording = recording_of(default_main_program())
    own = recording.own(_expect(array, "array_read"))
    _expect_index(i, "array_read")
    if own.sizes is None:
        raise ProgramError(f"{user_line()}: array_read: nothing was written to {own.name!r}, so its shape is unknown")
    sizes = own.sizes
    made = _in_block(recording, lambda: _append(recording, "read", (own, i), empty_fake(sizes, None, own.dtype)))
    return recording.handle(made)  # type: ignore[arg-type]  # a read has a result


def array_length(array: Any) -> Any:
    """Return the number of positions, int64 [1]."""
    recording = recording_of(default_main_program())
    own = recording.own(_expect(array, "array_length"))
    made = _in_block(recording, lambda: _append(recording, "length", (own,), empty_fake([1], None, torch.int64)))
    return recording.handle(made)  # type: ignore[arg-type]  # a length has a result


def _expect(array: Any, what: str) -> TensorArray:
    if not isinstance(array, TensorArray):
        raise ProgramError(f"{user_line()}: {what} needs an array (layers.create_array), got {array!r}")
    return array


def _expect_index(i: Any, what: str) -> None:
    if not isinstance(i, Variable) or i.dtype not in (torch.int64, torch.int32) or any(d != 1 for d in i.desc.shape):
        raise ProgramError(f"{user_line()}: {what} needs an int64 variable of one element as position, got {i!r}")
