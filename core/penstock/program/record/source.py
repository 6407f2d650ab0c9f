"""Find the line of the user's script that made a call."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).resolve().parents[2])
_TORCH = str(Path(torch.__file__).resolve().parent)
_CONTEXTLIB = str(Path(contextlib.__file__).resolve())  # stands between a block of ours and its caller


@functools.cache
def _foreign(filename: str) -> bool:
    path = filename if filename.startswith("<") else str(Path(filename).resolve())
    return not path.startswith((_OURS, _TORCH, _CONTEXTLIB, "<frozen", "<__array_function__"))


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


def running_module() -> torch.nn.Module | None:
    """Return the outermost module whose `forward` runs in this thread; None if there is none."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        found = own if isinstance(own, torch.nn.Module) else found
        frame = frame.f_back  # type: ignore[assignment]  # the loop ends at None
    return found
