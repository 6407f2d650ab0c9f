"""Entry points that torch does not hand over: an `nn.Module` called on Variables, `torch.zeros(x.shape[0], 4)`.

They are patched while a program is recorded. A module is recorded whole, on fake stand-ins: its parameters and buffers
are swapped for them while its forward runs and put back in any case, so that recording never writes the user's module
(batch-norm counters included). A function that makes a tensor of a given size has no Variable among its operands, and
torch would turn the batch into a number. Calls without a Variable or a size of a Program go straight through, as do
factories while `torch.compile` traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.compat.torch import module_tensors
from penstock.errors import ProgramError
from penstock.program.record.context import open_calls
from penstock.program.record.declared_sizes import fix_operands
from penstock.program.record.failures import telling
from penstock.program.record.patches import patches
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.sizes import recording_of_size
from penstock.program.record.variable import (
    Variable,
    operands_of,
    recording_in,
    recording_modes,
    recording_now,
    unwrap,
    wrap,
)

_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "rand", "randn", "randint", "randperm")


def _module_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls = open_calls()
        if calls and calls[-1][0].active:
            return _inner(*calls[-1], module, functools.partial(original, module, *args, **kwargs), (args, kwargs))
        found = None
        if any(isinstance(a, (Variable, list, tuple, dict)) for a in (*args, *kwargs.values())):
            found = recording_in((args, kwargs))
        if found is None:
            return original(module, *args, **kwargs)
        return record_module(found, module, args, kwargs, call=functools.partial(original, module))

    return call


def _inner(
    recording: Recording, paths: dict[int, str], module: torch.nn.Module, call: Callable[[], Any], operands: Any
) -> Any:
    outside = recording.normalises
    recording.modules.append(paths.get(id(module), recording.modules[-1]))
    recording.normalises = "num_batches_tracked" in dict(module.named_buffers(recurse=False))
    path = recording.modules[-1]
    try:
        with telling(lambda: _described(module, path), lambda: operands_of(operands, recording)):
            return call()
    finally:
        recording.modules.pop()
        recording.normalises = outside


def _described(module: torch.nn.Module, path: str) -> str:
    return f"module {path!r}, {type(module).__name__}({module.extra_repr()}),"


def record_module(
    recording: Recording,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str = "",
    call: Callable[..., Any] | None = None,
) -> Any:
    """Record one call of a module; parameters are called `<name>.<path>`. Returns Variables.

    `call`: what is left of a call under way, which a `__call__` of the module's class may have begun; None: all of it.
    """
    fix_operands((args, kwargs))
    root = name or _name_for(recording, module)
    paths = {id(m): f"{root}.{path}" if path else root for path, m in module.named_modules()}
    with undone_on_failure(recording):
        args, kwargs = unwrap(recording, (args, kwargs))
        open_calls().append((recording, paths))
        recording.modules.append(root)
        try:
            with patches.opened(), _stand_ins(recording, module, root) as swapped, recording_modes(recording):
                if call is None:
                    out = module(*args, **kwargs)
                else:
                    out = _inner(recording, paths, module, functools.partial(call, *args, **kwargs), (args, kwargs))
                _write_back(recording, swapped)
        finally:
            recording.modules.pop()
            open_calls().pop()
        return wrap(recording, out)


def _name_for(recording: Recording, module: torch.nn.Module) -> str:
    """The same module keeps its name when it is called again in the same Program."""
    if id(module) not in recording.module_names:
        recording.module_names[id(module)] = module, recording.program.unique(type(module).__name__.lower())
    return recording.module_names[id(module)][1]


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


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            recording = _asked(args) or _asked(kwargs.values())
            if recording is not None:
                return _made(recording, original, args, kwargs)
        return original(*args, **kwargs)

    return make


def _asked(operands: Iterable[Any]) -> Recording | None:
    """The Recording that a size among the operands belongs to, unless it is in a recorded call already."""
    for value in operands:
        if isinstance(value, torch.SymInt):
            found = recording_of_size(value)
            return None if found is None or found.active else _current(found)
        if isinstance(value, (tuple, list)) and (inner := _asked(value)) is not None:
            return inner
    return None


def _current(found: Recording) -> Recording | None:
    """Under the guard of a clone, that clone's."""
    chosen = recording_now(found)
    return None if chosen.active else chosen


def _made(recording: Recording, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with undone_on_failure(recording):
        with recording_modes(recording):
            out = original(*args, **kwargs)
        return wrap(recording, out)


patches.add((torch.nn.Module, "__call__", _module_call), *((torch, name, _factory) for name in _FACTORIES))
