"""`fluid.layers.load`: a file of Fluid that a Program reads when it runs.

    load_file(str path, int[] sizes, ScalarType dtype) -> Tensor

Reads a file with a single variable, as Fluid's operator `save` and `save_vars` write it, each time it runs; sequences
that the file has are dropped. Source: load_op.h, fluid.layers.load (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ProgramError
from penstock.io.fluid.folders import read_separate
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared import Declared, written
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes, wrap

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define("load_file(str path, int[] sizes, ScalarType dtype) -> Tensor")


def load(out: Any, file_path: str | PathLike[str], load_as_fp16: bool | None = None) -> None:
    """Write to `out` in each run what a file has, whose sizes and dtype are those of `out`.

    A variable that was declared without a shape gets that of the file, which has to be there then. With `load_as_fp16`
    values of another floating dtype are rounded to `out`, which is float16. A run raises UserError for a file that
    is not there or damaged, OperatorError for one with other sizes or another dtype. Raises ProgramError for an `out`
    with a batch, and RecordError for a parameter that is trained: load those by `fluid.io.load_vars`.
    """
    path, dtype = Path(fspath(file_path)), torch.float16 if load_as_fp16 else out.dtype
    sizes = _sizes(out, path)
    with name_scope(default_main_program().unique("load")), torch.no_grad():
        recording = recording_of(default_main_program())
        with recording_modes(recording):
            made = torch.ops.penstock.load_file(str(path), sizes, dtype)
            value = wrap(recording, made)
        written(out, value)


def _sizes(out: Variable, path: Path) -> list[int]:
    if isinstance(out, Declared) and not out.is_made and not out.shape:
        return list(_read(path).shape)
    sizes = list(out.desc.shape)
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) != len(sizes):
        raise ProgramError(
            f"{user_line()}: load: {out!r} has sizes that only a feed says; expected a variable with the sizes of the "
            f"file {str(path)!r}",
            variable=out.name,
        )
    return known


def _read(path: Path) -> Tensor:
    return read_separate(path.parent, [path.name])[path.name].values


def _load_file(path: str, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Raises ValueError for other sizes or another dtype, UserError for a file that cannot be read."""
    values = _read(Path(path))
    fits = values.dtype == dtype or (dtype == torch.float16 and values.dtype.is_floating_point)
    if list(values.shape) != list(sizes) or not fits:
        raise ValueError(
            f"penstock.load_file: {path} has {str(values.dtype).removeprefix('torch.')}{list(values.shape)}; expected "
            f"{str(dtype).removeprefix('torch.')}{list(sizes)}"
        )
    return values.to(dtype)


def _shape(path: str, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(list(sizes), dtype=dtype)


_LIBRARY.impl("load_file", _load_file, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::load_file", _shape, lib=_LIBRARY)
