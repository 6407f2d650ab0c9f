"""Operators on tensor arrays while they are recorded: in the block that is open, or in one of their own.

`TensorArray` is the handle. Its `sizes` are those of the elements; rows that differ from element to element are a
symbol that follows from data (record/symbols.py), which a block finds when it reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from penstock.errors import ProgramError
from penstock.program.expr import Dim
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.record.blocks import recorded_block, run_once
from penstock.program.record.context import current_role
from penstock.program.record.fakes import empty_fake
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable

Kind = Literal["array", "unsized"]


class TensorArray(Variable):
    """The handle of an array.

    `sizes`: those of its elements, once one was written. `varies`: whether elements have different numbers of rows.
    `varying`: further dimensions in which elements differ. `is_mixed`: they differ in dtype or number of dimensions.
    `levels`: arrays of the lengths of its elements' sequences, outermost level first, if they are ragged.
    """

    sizes: Sequence[Any] | None = None
    varies = False
    varying: frozenset[int] = frozenset()
    is_mixed = False
    levels: Sequence[TensorArray] = ()

    def for_recording(self, recording: Recording) -> Variable:
        """Return the handle of the same array in a clone of its Program."""
        copy = type(self)(recording, self.name, self.fake)
        copy.sizes, copy.varies, copy.varying, copy.is_mixed = self.sizes, self.varies, self.varying, self.is_mixed
        copy.levels = [level.for_recording(recording) for level in self.levels]  # type: ignore[misc]  # arrays, too
        return copy

    @property
    def rows(self) -> Dim | None:
        """The number of rows of its elements; None if they have no dimension."""
        return self._recording.symbols.dim(self.sizes[0]) if self.sizes else None


def append(
    recording: Recording, kind: str, operands: Sequence[Any], made: Sequence[torch.Tensor] = (), *, writes: bool = False
) -> list[str]:
    """Append an operator of `kernels.ARRAY_OPERATORS` to the block that is recorded; return the names of its results.

    `operands`: variables, lists of them, or plain data; `made`: fakes of the results; `writes`: it changes the first.
    """
    program = recording.program
    name = program.unique_operator(kind)
    names = tuple(f"{name}.tmp_{number}" for number in range(len(made)))
    for own, fake in zip(names, made, strict=True):
        recording.bind(fake, recording.describe(fake, own))
        recording.handle(fake)
    args = tuple(_argument(recording, one) for one in operands)
    written = (recording.own(operands[0]).name,) if writes else ()
    role, _ = current_role()
    program.append(
        Operator(name, f"penstock.{kind}", args, names, writes=written, role=role, module=recording.module_path(),
                 source=user_line())
    )  # fmt: skip
    return list(names)


def _argument(recording: Recording, value: Any) -> Arg:
    if isinstance(value, Variable):
        return Ref(recording.own(value).name)
    return tuple(_argument(recording, one) for one in value) if isinstance(value, (list, tuple)) else value


def counted(recording: Recording, value: Any) -> Any:
    """Return 0, 1, … below the value of a variable of one element, int64 [m], in the block that is open."""
    fake = empty_fake([recording.symbols.new_of_data()], None, torch.int64)
    append(recording, "rows_counted", (value,), [fake])
    return recording.handle(fake)


def in_block(recording: Recording, build: Callable[[], list[str]]) -> list[torch.Tensor]:
    """Append operators on arrays to the open block, or to one of their own; return their results."""
    if recording.open_blocks:
        return [recording.tensor_of(name) for name in build()]
    with recorded_block(recording) as block:
        names = build()
        recorded = block.close(names)
    return run_once(recording, recorded, names)


def set_kind(recording: Recording, name: str, kind: Kind) -> None:
    """Let a variable be an array, or the one element of one."""
    variables = recording.program.variables
    variables[name] = replace(variables[name], kind=kind)


def new_array(recording: Recording, dtype: torch.dtype) -> TensorArray:
    """Record an empty array."""

    def build() -> list[str]:
        names = append(recording, "array_new", (), [empty_fake([0], None, dtype)])
        set_kind(recording, names[0], "array")
        return names

    (made,) = in_block(recording, build)
    name = recording.name_of(made)
    set_kind(recording, name, "array")
    array = TensorArray(recording, name, made)
    recording.handles[name] = array
    return array


def named_array(recording: Recording, name: str, dtype: torch.dtype) -> TensorArray:
    """Record an empty array under a name."""
    array = new_array(recording, dtype)
    rename_recorded(recording, array.fake, name)
    return array


def copied(array: TensorArray, output: Any = None) -> TensorArray:
    """Record that an array, or a new one, gets the elements of another; return it. Raises ProgramError for others."""
    recording = array._recording
    target = new_array(recording, array.dtype) if output is None else output
    if not isinstance(target, TensorArray) or target.dtype != array.dtype or target is array or array.levels:
        raise ProgramError(
            f"{user_line()}: the array {array!r} cannot be assigned to {target!r}; expected another array of its "
            "dtype, of elements without sequences",
            variable=array.name,
        )
    in_block(recording, lambda: append(recording, "array_assign", (target, array), writes=True))
    own = recording.own(target)
    own.sizes, own.varies, own.varying, own.is_mixed = array.sizes, array.varies, array.varying, array.is_mixed
    return target
