"""The native libraries: the engine (`penstock.native.engine`) and Penstock's own operators (`load_operators`).

A library works with the torch minor version, the Python ABI and the platform it was built for and no other; that is
checked before it is loaded, because the dynamic linker's message for it is a mangled C++ name, and Python's that there
is no such module. Importing this package loads nothing.
"""

from __future__ import annotations

import functools
import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import UserError

_FOLDER = Path(__file__).resolve().parent


def python_abi() -> str:
    """Name the ABI of this Python with its platform, as in the file names of its extension modules."""
    return str(sysconfig.get_config_var("SOABI"))


def mismatches(built: Mapping[str, Any], *, torch: str, abi: str) -> list[str]:
    """List what the record of a build names differently from the torch and the Python ABI at hand."""
    found = []
    if built["torch"].split(".")[:2] != torch.split(".")[:2]:
        found.append(f"torch {built['torch']}, but torch {torch} is installed")
    built_abi = built.get("abi", "of an older build")  # which named none
    if built_abi != abi:
        found.append(f"Python {built_abi}, but this is {abi}")
    return found


def check_built(name: str, folder: Path = _FOLDER) -> None:
    """Check that library `name` was built for the torch and the Python that are here.  Raises: UserError."""
    import torch  # this package must be importable without it

    again = "build it with: python -m penstock.native.build (needs a C++20 compiler, ninja and Python's headers)"
    record = folder / "_built.json"
    if not record.is_file():
        raise UserError(f"the native library {name} is not built; {again}")
    built = json.loads(record.read_text())
    if name not in built["libraries"]:
        raise UserError(f"the native build of this installation holds {built['libraries']}, but not {name}; {again}")
    found = mismatches(built, torch=torch.__version__, abi=python_abi())
    if found:
        raise UserError(f"the native library {name} was built with {'; with '.join(found)}; {again}")


@functools.cache
def load_operators() -> None:
    """Register Penstock's own operators (`torch.ops.penstock.*`), once for the process.  Raises: UserError."""
    import torch  # this package must be importable without it

    check_built("_ops")
    torch.ops.load_library(_FOLDER / "_ops.so")  # type: ignore[no-untyped-call] # torch has not typed it
