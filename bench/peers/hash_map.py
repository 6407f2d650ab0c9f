"""A `std::unordered_map` and a plain array as tables, compiled from `hash_map.cpp` when they are needed."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bench.peers import FOLDER
from penstock.native.build import compiler

SOURCE = Path(__file__).resolve().parent / "hash_map.cpp"
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-shared", "-fPIC")
"""Those of our own table."""

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library; compile it if it is missing or older than its source. Raises CalledProcessError."""
    path = FOLDER / "hash_map.so"
    if not path.exists() or path.stat().st_mtime < SOURCE.stat().st_mtime:
        FOLDER.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")  # replaced in one step: two benchmarks may start at once
        subprocess.run([compiler(), *FLAGS, "-o", fresh, SOURCE], check=True)
        fresh.replace(path)
    loaded = ctypes.CDLL(str(path))
    for name in ("map_new", "array_new"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.array_lines.restype = ctypes.c_uint64
    return loaded


def _at(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class MapTable:
    """A map with rows on the heap. A context: its memory goes at the end."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._map = ctypes.c_void_p(library().map_new(ctypes.c_uint64(width)))

    def pull(self, ids: Ids, out: Floats) -> None:
        """out[i] = the row of ids[i], made of zeros if missing."""
        library().map_pull(self._map, _at(ids), ctypes.c_uint64(len(ids)), _at(out))

    def push(self, rule: str, ids: Ids, gradients: Floats, lr: float) -> None:
        """Update rows one by one by `rule`, "sgd" or "adagrad"; equal ids are not summed first."""
        call = {"sgd": library().map_push_sgd, "adagrad": library().map_push_adagrad}[rule]
        call(self._map, _at(ids), ctypes.c_uint64(len(ids)), _at(gradients), ctypes.c_float(lr))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        library().map_delete(self._map)


class ArrayRows:
    """Rows of a plain array by their number: what memory can do at best. Raises MemoryError."""

    def __init__(self, rows: int, width: int) -> None:
        self._rows, self._width = rows, width
        self._array = ctypes.c_void_p(library().array_new(ctypes.c_uint64(rows), ctypes.c_uint64(width)))
        if self._array.value is None:
            raise MemoryError(f"no memory for {rows} rows of {width} floats")

    def gather(self, numbers: Ids, out: Floats) -> None:
        """out[i] = row numbers[i]."""
        count, width = ctypes.c_uint64(len(numbers)), ctypes.c_uint64(self._width)
        library().array_gather(self._array, _at(numbers), count, width, _at(out))

    @property
    def num_lines(self) -> int:
        """Cache lines of 64 bytes that the array has."""
        return self._rows * self._width // 16

    def read_lines(self, lines: Ids) -> int:
        """Read one word of each of these cache lines, prefetched; return the words' sum."""
        return int(library().array_lines(self._array, _at(lines), ctypes.c_uint64(len(lines))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        library().array_delete(self._array, ctypes.c_uint64(self._rows), ctypes.c_uint64(self._width))
