"""The factory door: `torch.zeros(x.shape[0], 4)` and its like with a Variable's sizes, outside a module.

No Variable is among the operands of such a call, so torch tells the recorder nothing; it would turn the batch into a
number. The functions of `torch` that make tensors of a given size are wrapped once; a call without a symbolic size of
a Program goes straight through, as does one while `torch.compile` traces.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock.compat.torch import shape_env_of
from penstock.program.record.context import default_main_program
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.variable import recording_modes, wrap

_NAMES = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "rand", "randn", "randint", "randperm")
_worlds: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()  # by id of its ShapeEnv


def install(recording: Recording) -> None:
    """Open the door for the sizes of `recording`'s Program. Idempotent."""
    _worlds[id(recording.shape_env)] = recording
    for name in _NAMES:
        original = getattr(torch, name)
        if not hasattr(original, "_penstock_door"):
            setattr(torch, name, _door(original))


def _door(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            recording = _asked(args) or _asked(kwargs.values())
            if recording is not None:
                return _record(recording, original, args, kwargs)
        return original(*args, **kwargs)

    make._penstock_door = True  # type: ignore[attr-defined]  # a mark of ours
    return make


def _asked(operands: Iterable[Any]) -> Recording | None:
    """The Recording that a size among the operands belongs to, unless it is in a recorded call already."""
    for value in operands:
        if isinstance(value, torch.SymInt):
            found = _worlds.get(id(shape_env_of(value)))
            return None if found is None or found.active else _current(found)
        if isinstance(value, (tuple, list)) and (inner := _asked(value)) is not None:
            return inner
    return None


def _current(found: Recording) -> Recording | None:
    """Under the guard of a clone, that clone's."""
    current = default_main_program().recording
    chosen: Recording = current if current is not None and current.origin is found.origin else found
    return None if chosen.active else chosen


def _record(recording: Recording, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with undone_on_failure(recording):
        with recording_modes(recording):
            out = original(*args, **kwargs)
        return wrap(recording, out)
