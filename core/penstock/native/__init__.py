"""The native libraries: the engine (`penstock.native.engine`) and Penstock's own operators (`load_operators`).

A library works with the torch minor version it was built with and no other; that is checked before it is loaded,
because the dynamic linker's message for it is a mangled C++ name. Importing this package loads nothing.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from penstock.errors import UserError

_FOLDER = Path(__file__).resolve().parent


def check_built(name: str) -> None:
    """Check that library `name` was built for the torch that is installed.  Raises: UserError."""
    import torch  # this package must be importable without it

    again = "build it with: python -m penstock.native.build"
    record = _FOLDER / "_built.json"
    if not record.is_file():
        raise UserError(f"the native library {name} is not built; {again}")
    built = json.loads(record.read_text())
    if name not in built["libraries"]:
        raise UserError(f"the native build of this installation holds {built['libraries']}, but not {name}; {again}")
    if built["torch"].split(".")[:2] != torch.__version__.split(".")[:2]:
        raise UserError(
            f"the native library {name} was built with torch {built['torch']}, but torch {torch.__version__} is "
            f"installed; {again}"
        )


@functools.cache
def load_operators() -> None:
    """Register Penstock's own operators (`torch.ops.penstock.*`), once for the process.  Raises: UserError."""
    import torch  # this package must be importable without it

    check_built("_ops")
    torch.ops.load_library(_FOLDER / "_ops.so")  # type: ignore[no-untyped-call] # torch has not typed it
