"""A plain parser of MultiSlot text, and what a data set gives as plain lists."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import penstock as fluid
from penstock.dataset import Dataset
from penstock.dataset.dataset_base import Run
from penstock.dataset.slots import LENGTHS, feed_of

_STRTOF = ctypes.CDLL(None).strtof
_STRTOF.restype, _STRTOF.argtypes = ctypes.c_float, [ctypes.c_char_p, ctypes.c_void_p]
_COUNT = re.compile(rb"\d{1,19}")
_WHOLE = re.compile(rb"-?\d+")
_DECIMAL = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Row = tuple[tuple[float, ...], ...]


def float32(text: bytes) -> float:
    """The float nearest to a decimal number, by the C library."""
    return float(_STRTOF(text, None))


def parsed(line: bytes, slots: Sequence[tuple[bool, int]]) -> Row | None:
    """Return the values of each slot (is float, width or 0), or None for a line that cannot be read."""
    tokens = [token for token in re.split(rb"[ \t\r]+", line) if token]
    row = []
    for is_float, width in slots:
        if not tokens or not _COUNT.fullmatch(tokens[0]):
            return None
        count = int(tokens[0])
        given, tokens = tokens[1 : 1 + count], tokens[1 + count :]
        if count == 0 or len(given) < count or (width and count != width):
            return None
        values = [_value(token, is_float) for token in given]
        if any(value is None for value in values):
            return None
        row.append(tuple(value for value in values if value is not None))
    return None if tokens else tuple(row)


def _value(token: bytes, is_float: bool) -> float | None:
    if is_float:
        value = float32(token) if _DECIMAL.fullmatch(token) else math.inf
        return value if math.isfinite(value) else None
    if not _WHOLE.fullmatch(token) or not -(1 << 63) <= int(token) < 1 << 64:
        return None
    return (int(token) + (1 << 63)) % (1 << 64) - (1 << 63)


def inputs(slots: Sequence[tuple[bool, int]]) -> list[Any]:
    """Return an input for each slot, of a program of their own."""
    return _inputs(tuple(slots))


@functools.cache
def _inputs(slots: tuple[tuple[bool, int], ...]) -> list[Any]:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        return [
            fluid.layers.data(
                f"slot{i}",
                [width] if width else [-1, -1],
                dtype="float32" if is_float else "int64",
                lod_level=0 if width else 1,
            )
            for i, (is_float, width) in enumerate(slots)
        ]


def batches(dataset: Dataset, at_most: int | None = None) -> Iterator[list[Row]]:
    """Give the batches of a pass as rows of plain numbers."""
    run = dataset.open()
    names = {slot.name for slot in run.slots}
    given = 0
    try:
        while (at_most is None or given < at_most) and (batch := run.take()) is not None:
            feed = feed_of(batch, run.slots, names | {name + LENGTHS for name in names})
            columns = []
            for slot in run.slots:
                values = feed[slot.name].reshape(len(batch), -1).tolist()
                if not slot.width:
                    values = [v[:n] for v, n in zip(values, feed[slot.name + LENGTHS][:, 0].tolist(), strict=True)]
                columns.append([tuple(v) for v in values])
            yield list(zip(*columns, strict=True))
            run.used(batch)
            given += 1
    finally:
        run.close()


def drained(run: Run) -> int:
    """Take what is left of a pass; return how many samples it was."""
    count = 0
    while (batch := run.take()) is not None:
        count += len(batch)
    return count


def rows(dataset: Dataset) -> list[Row]:
    """Return all rows of a pass."""
    return [row for batch in batches(dataset) for row in batch]


def dataset_of(
    files: Sequence[Path], slots: Sequence[tuple[bool, int]], kind: str = "QueueDataset", batch_size: int = 3
) -> Any:
    """Return a data set over files."""
    dataset = fluid.DatasetFactory().create_dataset(kind)
    dataset.set_use_var(inputs(slots))
    dataset.set_filelist([str(file) for file in files])
    dataset.set_batch_size(batch_size)
    return dataset


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
