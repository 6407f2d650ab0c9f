"""Inputs of a Program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ArgumentError, ProgramError
from penstock.program.ir import VarDesc
from penstock.program.record import entry_points as _patches  # noqa: F401 - of torch, while a program is recorded
from penstock.program.record.context import default_main_program, record_on
from penstock.program.record.declared_sizes import declared_shape, open_positions
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named
from penstock.program.sequences import LENGTHS, ROWS, STEPS

_DTYPES = {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}


def data(
    name: str,
    shape: Sequence[int | None],
    append_batch_size: bool = True,
    dtype: str | torch.dtype = "float32",
    lod_level: int = 0,
    type: object = None,
    stop_gradient: bool = True,
) -> Variable:
    """Declare an input. `append_batch_size`: put the batch (-1) before `shape`, unless a -1 stands in it already.

    `lod_level` 1 or more, and no -1 but the first: ragged, the rows of all sequences one after another, as many as are
    fed; see docs/sequences.md. [-1, -1, …] with a lod_level is a padded batch.
    As layers of Fluid flatten what they are given, a feed may have more or fewer dimensions of size 1 behind the batch:
    labels [n] for [n, 1]. A size may be fed as another one, as long as nothing depends on the number: all of a shape
    without a batch, and the steps of [-1, steps, width].
    """
    sizes = [_size(d) for d in shape]
    if append_batch_size and not any(d < 0 for d in sizes):
        sizes = [-1, *sizes]
    return _input(name, sizes, dtype, lod_level, stop_gradient, loose=True)


def fluid_data(
    name: str, shape: Sequence[int | None], dtype: str | torch.dtype = "float32", lod_level: int = 0
) -> Variable:
    """Declare an input with its whole shape (`fluid.data`); None and -1 are sizes that are known when fed."""
    return _input(name, [_size(d) for d in shape], dtype, lod_level, True)


def _size(given: Any) -> int:
    """Return a size of an input; -1 for one that is known when fed: None, or a size of another variable (`x.shape`)."""
    return -1 if given is None or isinstance(given, torch.SymInt) else int(given)


def steps_input(name: str) -> Variable:
    """Return the steps of the longest sequence of the ragged input `name`, int64 [m], which executors feed."""
    return _input(name + STEPS, [-1], "int64", 0, True, own_rows=True)


def rows_input(name: str) -> Variable:
    """Return the rows of the sequences whose lengths are the input `name`, int64 [rows, 1], which executors feed."""
    return _input(name + ROWS, [-1, 1], "int64", 1, True)


def _input(
    name: str,
    sizes: list[int],
    dtype: str | torch.dtype,
    lod_level: int,
    stop_gradient: bool,
    *,
    own_rows: bool = False,
    loose: bool = False,
) -> Variable:
    if not isinstance(name, str):
        raise ArgumentError(f"{user_line()}: the name of an input is {name!r}; expected a string")
    dtype = str(dtype_named(dtype)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ProgramError(
            f"{user_line()}: input {name!r} has dtype {dtype!r}; expected one of {', '.join(sorted(_DTYPES))}",
            variable=name,
        )
    if lod_level > 0 and sizes and min(sizes) >= 0:
        sizes = [-1, *sizes[1:]]  # a number of rows says nothing of sequences
    main = default_main_program()
    record_on(main)
    recording = recording_of(main)
    if name in main.variables and main.variables[name].feed:
        return _declared_again(recording, main.variables[name], sizes, dtype)
    if written := [v.name for v in main.variables.values() if v.parameter and v.trainable and v.buffer]:
        raise ProgramError(
            f"{user_line()}: input {name!r} is declared in a program that writes the trainable parameter "
            f"{written[0]!r} in place. Write it in a program of its own, without inputs",
            variable=name,
        )
    ragged = lod_level > 0 and [i for i, size in enumerate(sizes) if size < 0] == [0]
    if ragged:
        _input(name + LENGTHS, [-1, 1], "int64", lod_level - 1, True)
    is_open = open_positions(sizes, lod_level) if loose else ()
    fake = recording.fake_of_shape(sizes, getattr(torch, dtype), own_rows=ragged or own_rows, open_sizes=is_open)
    described: VarDesc = recording.describe(fake, name, feed=True)
    recording.bind(fake, replace(described, lod_level=lod_level, loose=loose))
    if not stop_gradient:
        fake.requires_grad_(True)
    return recording.handle(fake)  # type: ignore[no-any-return]  # a Variable


def _declared_again(recording: Recording, old: VarDesc, sizes: list[int], dtype: str) -> Variable:
    """Return the input that has this name already. Raises ProgramError if it is another one."""
    before = declared_shape(recording, old.shape)
    if before != sizes or old.dtype != dtype:
        raise ProgramError(
            f"{user_line()}: input {old.name!r} is declared as {dtype}{sizes}, but it exists as {old.dtype}{before} "
            f"(declared at {old.source}). Give one of them another name",
            variable=old.name,
        )
    return recording.program.handle(old.name)  # type: ignore[no-any-return]  # a Variable
