"""Pair the names in an Operator with the tensors that it is called with, and with those that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock.program.ir import Arg, Operator, Ref


def named_operands(op: Operator, values: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) for each operand; `values`: those of the positional arguments, then of the named ones."""
    return list(_named((*op.args, *(v for _, v in op.kwargs)), values))


def _named(args: tuple[Arg, ...], values: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for arg, value in zip(args, values, strict=True):
        if isinstance(arg, Ref):
            yield arg.name, value
        elif isinstance(arg, tuple):
            yield from _named(arg, value)


def named_results(op: Operator, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each result that is kept and was made."""
    values = result if isinstance(result, tuple) else (result,)
    for name, value in zip(op.outputs, values, strict=False):
        if isinstance(name, tuple):
            yield from zip(name, value, strict=True)
        elif name is not None and value is not None:  # a kernel may leave out what its output mask excludes
            yield name, value
