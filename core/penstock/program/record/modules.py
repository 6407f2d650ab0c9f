"""The module door: an `nn.Module` called on Variables is recorded whole, on fake stand-ins.

The module's parameters and buffers are swapped for their stand-ins while its forward runs and put back
in any case, so that recording never writes the user's module (batch-norm counters included).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.compat.torch import module_tensors
from penstock.errors import ProgramError
from penstock.program.record.failures import telling
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.variable import Variable, operands_of, recording_in, recording_modes, unwrap, wrap

_original_call = torch.nn.Module.__call__


class _Open(threading.local):
    """The module calls that this thread records now, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[tuple[Recording, dict[int, str]]] = []


_open = _Open()


def install() -> None:
    """Open the door: from now on `module(variable)` records. Idempotent; other calls go straight through."""
    if torch.nn.Module.__call__ is not _call:
        torch.nn.Module.__call__ = _call  # type: ignore[method-assign]  # the door


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _open.calls and _open.calls[-1][0].active:
        recording, paths = _open.calls[-1]
        return _inner(recording, paths, module, args, kwargs)
    if not any(isinstance(a, (Variable, list, tuple, dict)) for a in (*args, *kwargs.values())):
        return _original_call(module, *args, **kwargs)
    found = recording_in((args, kwargs))
    if found is None:
        return _original_call(module, *args, **kwargs)
    return record_module(found, module, args, kwargs)


def _inner(
    recording: Recording, paths: dict[int, str], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    outside = recording.normalises
    recording.modules.append(paths.get(id(module), recording.modules[-1]))
    recording.normalises = "num_batches_tracked" in dict(module.named_buffers(recurse=False))
    path = recording.modules[-1]
    try:
        with telling(lambda: _described(module, path), lambda: operands_of((args, kwargs), recording)):
            return _original_call(module, *args, **kwargs)
    finally:
        recording.modules.pop()
        recording.normalises = outside


def _described(module: torch.nn.Module, path: str) -> str:
    return f"module {path!r}, {type(module).__name__}({module.extra_repr()}),"


def record_module(
    recording: Recording, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
) -> Any:
    """Record one call of a module; parameters are called `<name>.<path>`. Returns Variables."""
    root = name or _name_for(recording, module)
    paths = {id(m): f"{root}.{path}" if path else root for path, m in module.named_modules()}
    with undone_on_failure(recording):
        args, kwargs = unwrap(recording, (args, kwargs))
        _open.calls.append((recording, paths))
        recording.modules.append(root)
        try:
            with _stand_ins(recording, module, root) as swapped, recording_modes(recording):
                out = _inner(recording, paths, module, args, kwargs)
                _write_back(recording, swapped)
        finally:
            recording.modules.pop()
            _open.calls.pop()
        return wrap(recording, out)


_names: dict[int, tuple[torch.nn.Module, str]] = {}


def _name_for(recording: Recording, module: torch.nn.Module) -> str:
    """The same module keeps its name when it is called again in the same Program."""
    key = id(module) ^ id(recording)
    known = _names.get(key)
    if known is None or known[0] is not module:
        known = _names[key] = (module, recording.program.unique(type(module).__name__.lower()))
    return known[1]


@dataclass(frozen=True, slots=True)
class _Swapped:
    """One parameter or buffer: where the module keeps it, the user's tensor, and what stood in for it."""

    store: dict[str, Any]
    key: str
    name: str
    own: torch.Tensor
    stand_in: torch.Tensor


@contextmanager
def _stand_ins(recording: Recording, module: torch.nn.Module, root: str) -> Iterator[list[_Swapped]]:
    swapped: list[_Swapped] = []
    try:
        for path, part in module.named_modules():
            prefix = f"{root}.{path}" if path else root
            for store in module_tensors(part):
                for key, tensor in store.items():
                    if tensor is not None:
                        stand_in = recording.capture(tensor, f"{prefix}.{key}")
                        swapped.append(_Swapped(store, key, f"{prefix}.{key}", tensor, stand_in))
                        store[key] = stand_in
        yield swapped
    finally:
        for one in swapped:
            one.store[one.key] = one.own


def _write_back(recording: Recording, swapped: list[_Swapped]) -> None:
    """Record what forward assigned to buffers as writes. Raises ProgramError for what a Program cannot keep."""
    for one in swapped:
        now = one.store.get(one.key)
        if now is one.stand_in:
            continue
        name = recording.name_of(one.stand_in)
        if recording.program.variables[name].parameter:
            raise ProgramError(
                f"forward assigns a new tensor to parameter {one.name!r}, which a recorded program cannot keep. "
                "Compute with a local variable, or make it a buffer",
                variable=name,
            )
        if not isinstance(now, torch.Tensor) or now.shape != one.stand_in.shape or now.dtype != one.stand_in.dtype:
            what = f"{now.dtype}{list(now.shape)}" if isinstance(now, torch.Tensor) else type(now).__name__
            raise ProgramError(
                f"forward assigns {what} to buffer {one.name!r} of {one.stand_in.dtype}{list(one.stand_in.shape)}; a "
                "recorded program keeps shape and dtype of its state",
                variable=name,
            )
        with torch.no_grad():
            one.stand_in.copy_(now)
