"""Find the line of the user's script that made a call."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).resolve().parents[2])
_TORCH = str(Path(torch.__file__).resolve().parent)
_CONTEXTLIB = str(Path(contextlib.__file__).resolve())  # stands between a block of ours and its caller
_CACHE: dict[str, bool] = {}


def _foreign(filename: str) -> bool:
    known = _CACHE.get(filename)
    if known is None:
        path = filename if filename.startswith("<") else str(Path(filename).resolve())
        known = _CACHE[filename] = not path.startswith((_OURS, _TORCH, _CONTEXTLIB, "<frozen", "<__array_function__"))
    return known


def line_of_frame(filename: str, line: int | None) -> str:
    """Return 'file.py:41' for a frame of the user's; '' for one of penstock or torch."""
    return f"{Path(filename).name}:{line}" if _foreign(filename) else ""


def user_line() -> str:
    """Return 'file.py:41' of the innermost frame outside penstock and torch; '' if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if _foreign(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # the loop ends at None
    return ""
