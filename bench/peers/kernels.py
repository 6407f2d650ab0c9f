"""The libraries that answer MKL's vendor check for a column, compiled from `equal_kernels.c` when they are needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from bench.peers import FOLDER

SOURCE = Path(__file__).resolve().parent / "equal_kernels.c"

Column = Literal["installed", "equal", "foreign"]
_ANSWERS: dict[Column, int] = {"equal": 1, "foreign": 0}


def preloaded(column: Column) -> Path | None:
    """Return the library to preload in a column, None for none.

    Compile it with `cc` (or $CC) if it is missing or older than its source. Raises CalledProcessError if the
    compiler fails, FileNotFoundError if there is none.
    """
    if column not in _ANSWERS:
        return None
    library = FOLDER / f"{column}_kernels.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        FOLDER.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")  # replaced in one step: two benchmarks may start at once
        answer = f"-DANSWER={_ANSWERS[column]}"
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", answer, "-o", fresh, SOURCE], check=True)
        fresh.replace(library)
    return library
