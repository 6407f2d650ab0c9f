"""Tensors as Fluid writes them: a LoD tensor, or selected rows, one after another in a file.

A LoD tensor: uint32 version 0 · uint64 number of levels · of each level uint64 size in bytes and that many bytes of
uint64 offsets · a tensor. Selected rows: uint32 version 0 · uint64 number of rows · int64 of each row · int64 height ·
a tensor. A tensor: uint32 version 0 · int32 size of a TensorDesc · that message · the values, row by row. All numbers
are little endian. Every size is compared with what the file has left before anything is allocated for it.

Source: lod_tensor.cc, selected_rows.cc and tensor_util.cc (Fluid 1.8).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from penstock.errors import UserError
from penstock.io.fluid import schema
from penstock.io.saves.manifest import Damaged

_MOST_LEVELS = 64
_MOST_DIMENSIONS = 9  # of Fluid's DDim
_TYPES = {name: number for number, name in schema.DTYPES.items()}


@dataclass(frozen=True, slots=True)
class FluidTensor:
    """A saved tensor. `lod`: offsets of each level, outermost first. `rows`: of selected rows, in a table of `height`
    rows; None for a LoD tensor."""

    values: torch.Tensor
    lod: list[np.ndarray] = field(default_factory=list)
    rows: np.ndarray | None = None
    height: int = 0


class Reading:
    """A file that is read from its beginning. `left` bytes are not read yet."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self.path, self._file = str(path), file
        self.left = path.stat().st_size

    def take(self, count: int, what: str) -> bytearray:
        """Return the next `count` bytes. Raises Damaged if the file has fewer; then nothing is allocated."""
        if count < 0 or count > self.left:
            raise self.damaged(f"{what} should have {count} bytes, but {self.left} are left")
        buffer = bytearray(count)
        if self._file.readinto(buffer) != count:
            raise self.damaged(f"{what} ends early")
        self.left -= count
        return buffer

    def number(self, code: str, what: str) -> int:
        """Return the next number, by its code of `struct`."""
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0])

    def array(self, size_bytes: int, kind: str, what: str) -> np.ndarray:
        """Return the next numbers of 8 bytes each."""
        if size_bytes % 8:
            raise self.damaged(f"{what} has {size_bytes} bytes, which is no multiple of 8")
        return np.frombuffer(self.take(size_bytes, what), kind)

    def version(self, what: str) -> None:
        """Read a version. Raises Damaged for another one than 0, the only one there is."""
        if (version := self.number("I", what)) != 0:
            raise self.damaged(f"{what} is {version}; expected 0")

    def damaged(self, reason: str) -> Damaged:
        """Return the error of a file that is not what Fluid writes."""
        return Damaged(
            f"{self.path} is no tensor of Fluid, or is damaged: {reason}. Use another copy, and check that the file "
            "was written by save_vars, save_params or save_persistables",
            file=self.path,
        )


def read_tensor(reading: Reading) -> FluidTensor:
    """Return the next LoD tensor. Raises Damaged."""
    reading.version("the version of a LoD tensor")
    levels = reading.number("Q", "the number of LoD levels")
    if levels > _MOST_LEVELS:
        raise reading.damaged(f"it has {levels} LoD levels")
    lod = []
    for level in range(levels):
        size = reading.number("Q", f"the size of LoD level {level}")
        lod.append(reading.array(size, "<u8", f"LoD level {level}").astype(np.int64))
    values = _read_values(reading)
    _check_lod(reading, lod, values)
    return FluidTensor(values, lod)


def read_selected_rows(reading: Reading) -> FluidTensor:
    """Return the next selected rows. Raises Damaged."""
    reading.version("the version of selected rows")
    count = reading.number("Q", "the number of rows")
    rows = reading.array(count * 8, "<i8", "the rows")
    height = reading.number("q", "the height")
    values = _read_values(reading)
    if values.dim() == 0 or len(values) != count or (count and not 0 <= int(rows.min()) <= int(rows.max()) < height):
        raise reading.damaged(f"{count} rows of a table of {height} have values {list(values.shape)}")
    return FluidTensor(values, rows=rows, height=height)


def _check_lod(reading: Reading, lod: Sequence[np.ndarray], values: torch.Tensor) -> None:
    ends = [*(len(level) - 1 for level in lod[1:]), len(values) if values.dim() else 1]
    for level, end in zip(lod, ends, strict=False):  # without levels there is no end
        if len(level) == 0 or level[0] != 0 or level[-1] != end or (np.diff(level) < 0).any():
            raise reading.damaged(f"the offsets {level[:8].tolist()} do not go from 0 to {end}")


def _read_values(reading: Reading) -> torch.Tensor:
    reading.version("the version of a tensor")
    size = reading.number("i", "the size of a TensorDesc")
    described = schema.parsed("TensorDesc", bytes(reading.take(size, "a TensorDesc")), reading.path)
    dtype, dims = schema.DTYPES.get(described.data_type), [int(d) for d in described.dims]
    if dtype is None:
        raise reading.damaged(f"its dtype has the number {described.data_type}; expected one of {schema.DTYPES}")
    if len(dims) > _MOST_DIMENSIONS or min(dims, default=0) < 0 or math.prod(max(d, 1) for d in dims) >= 2**62:
        raise reading.damaged(f"it has the sizes {dims[: _MOST_DIMENSIONS + 1]}")
    kind = getattr(torch, dtype)
    raw = reading.take(math.prod(dims) * kind.itemsize, f"a tensor {dtype}{dims}")
    return torch.frombuffer(raw, dtype=kind).reshape(dims) if raw else torch.empty(dims, dtype=kind)


def write_tensor(file: BinaryIO, saved: FluidTensor) -> None:
    """Append a LoD tensor, or selected rows. Raises UserError for a dtype that Fluid lacks."""
    values = saved.values.detach().cpu().contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in _TYPES:
        raise UserError(f"a tensor of {dtype} cannot be written for Fluid; expected one of {sorted(_TYPES)}")
    described = schema.message("TensorDesc")(data_type=_TYPES[dtype], dims=list(values.shape)).SerializeToString()
    file.write(_header(saved))
    file.write(struct.pack("<Ii", 0, len(described)) + described)
    if values.numel():
        file.write(values.reshape(-1).view(torch.uint8).numpy().data)


def _header(saved: FluidTensor) -> bytes:
    if saved.rows is None:
        levels = [np.asarray(level, "<u8").tobytes() for level in saved.lod]
        return struct.pack("<IQ", 0, len(levels)) + b"".join(struct.pack("<Q", len(one)) + one for one in levels)
    rows = np.asarray(saved.rows, "<i8").tobytes()
    return struct.pack("<IQ", 0, len(saved.rows)) + rows + struct.pack("<q", saved.height)
