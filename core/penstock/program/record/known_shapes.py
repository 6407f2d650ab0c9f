"""Shapes of calls that were recorded before in this process, in whatever Program: each is found once.

Kept are calls of torch's and our own operators on plain operands: their shapes follow from what the key holds. An
operator of the user's, or an operand such as a generator, has its shapes found anew in each Program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.program.record.fakes import Fake

_LIMIT = 8192  # calls; a program has some hundreds that differ
_MADE: dict[Any, Any] = {}
_OPERATORS = ("aten", "prims", "penstock")
_PLAIN = (
    Fake, torch.SymInt, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def key_of(func: Any, leaves: Sequence[Any], structure: Any, step: int) -> Any:
    """What the shapes of a call's results depend on in one Program; None if an operand has no value to compare."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Fake):
            parts = (tuple(map(str, leaf.shape)), tuple(map(str, leaf.stride())))
            return (*parts, leaf.dtype, leaf.is_conj())
        return leaf.node.value if isinstance(leaf, torch.SymInt) else (type(leaf), leaf)

    key = (func, tuple(map(of, leaves)), str(structure), step)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def shared_key(key: Any, leaves: Sequence[Any], hints: Mapping[str, int], declared: Mapping[str, int]) -> Any:
    """The same in every Program; None if the call is not kept. `hints`: of the symbols in the operands."""
    if key is None or key[0].namespace not in _OPERATORS or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    symbols = tuple((name, hint, name in declared) for name, hint in hints.items())
    return (key, symbols, torch.get_default_dtype())


def recall(key: Any) -> Any:
    """Return what was kept under a key of `shared_key`; None if nothing was."""
    return _MADE.get(key)


def keep(key: Any, answer: Any) -> None:
    """Keep an answer, which may not be changed. No-op if `key` is None."""
    if key is None:
        return
    if len(_MADE) >= _LIMIT:
        _MADE.clear()
    _MADE[key] = answer
