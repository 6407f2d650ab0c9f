"""Inputs of a Program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.errors import ProgramError
from penstock.program.ir import VarDesc
from penstock.program.record import entry_points as _patches  # noqa: F401 - of torch, while a program is recorded
from penstock.program.record.context import default_main_program, record_on
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable

_DTYPES = {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}


def data(
    name: str,
    shape: Sequence[int | None],
    append_batch_size: bool = True,
    dtype: str = "float32",
    lod_level: int = 0,
    type: object = None,
    stop_gradient: bool = True,
) -> Variable:
    """Declare an input. `append_batch_size`: put the batch (-1) before `shape`, unless a -1 stands in it already."""
    sizes = [-1 if d is None else int(d) for d in shape]
    if append_batch_size and not any(d < 0 for d in sizes):
        sizes = [-1, *sizes]
    return _input(name, sizes, dtype, lod_level, stop_gradient)


def fluid_data(name: str, shape: Sequence[int | None], dtype: str = "float32", lod_level: int = 0) -> Variable:
    """Declare an input with its whole shape (`fluid.data`); None and -1 are sizes that are known when fed."""
    return _input(name, [-1 if d is None else int(d) for d in shape], dtype, lod_level, True)


def _input(name: str, sizes: list[int], dtype: str, lod_level: int, stop_gradient: bool) -> Variable:
    if dtype not in _DTYPES:
        raise ProgramError(
            f"{user_line()}: input {name!r} has dtype {dtype!r}; expected one of {', '.join(sorted(_DTYPES))}",
            variable=name,
        )
    record_on(default_main_program())
    recording = recording_of(default_main_program())
    fake = recording.fake_of_shape(sizes, getattr(torch, dtype))
    described: VarDesc = recording.describe(fake, name, feed=True)
    recording.bind(fake, replace(described, lod_level=lod_level))
    if not stop_gradient:
        fake.requires_grad_(True)
    return recording.handle(fake)  # type: ignore[no-any-return]  # a Variable
