"""The module door: an `nn.Module` called on Variables is recorded whole, on fake stand-ins.

The module's parameters and buffers are swapped for their stand-ins while its forward runs and put back
in any case, so that recording never writes the user's module (batch-norm counters included).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.variable import Variable, recording_in, recording_modes, unwrap, wrap

_original_call = torch.nn.Module.__call__
_open: list[tuple[Recording, dict[int, str]]] = []


def install() -> None:
    """Open the door: from now on `module(variable)` records. Idempotent; other calls go straight through."""
    if torch.nn.Module.__call__ is not _call:
        torch.nn.Module.__call__ = _call  # type: ignore[method-assign]  # the door


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _open and _open[-1][0].active:
        recording, paths = _open[-1]
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
    recording.normalises = isinstance(module, torch.nn.modules.batchnorm._NormBase)
    try:
        return _original_call(module, *args, **kwargs)
    finally:
        recording.modules.pop()
        recording.normalises = outside


def record_module(
    recording: Recording, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
) -> Any:
    """Record one call of a module; parameters are called `<name>.<path>`. Returns Variables."""
    root = name or _name_for(recording, module)
    paths = {id(m): f"{root}.{path}" if path else root for path, m in module.named_modules()}
    with undone_on_failure(recording):
        args, kwargs = unwrap(recording, (args, kwargs))
        _open.append((recording, paths))
        recording.modules.append(root)
        try:
            with _stand_ins(recording, module, root), recording_modes(recording):
                out = _inner(recording, paths, module, args, kwargs)
        finally:
            recording.modules.pop()
            _open.pop()
        return wrap(recording, out)


_names: dict[int, tuple[torch.nn.Module, str]] = {}


def _name_for(recording: Recording, module: torch.nn.Module) -> str:
    """The same module keeps its name when it is called again in the same Program."""
    key = id(module) ^ id(recording)
    known = _names.get(key)
    if known is None or known[0] is not module:
        known = _names[key] = (module, recording.program.unique(type(module).__name__.lower()))
    return known[1]


@contextmanager
def _stand_ins(recording: Recording, module: torch.nn.Module, root: str) -> Iterator[None]:
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, part in module.named_modules():
            prefix = f"{root}.{path}" if path else root
            for store in (part._parameters, part._buffers):
                for key, tensor in store.items():
                    if tensor is not None:
                        swapped.append((store, key, tensor))
                        store[key] = recording.capture(tensor, f"{prefix}.{key}")
        yield
    finally:
        for store, key, tensor in swapped:
            store[key] = tensor
