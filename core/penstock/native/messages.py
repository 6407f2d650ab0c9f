"""Operators that say something about tensors: `print`, and `expect_true`, which fails.

    print(Tensor x, Tensor? lengths, Tensor rng, str name, str message, int first_n, int summarize, str shows,
          str phase) -> Tensor

Returns x and writes to standard output, in Fluid's form; its gradient does so with the gradient. `first_n`: only in the
first runs of the Program, 0 and below in each. `summarize`: how many elements, -1 all. `shows`: of name, lod, shape,
layout, type, with blanks between. `phase`: forward, backward or both.

    expect_true(Tensor condition, Tensor[] values, str[] names, str name, int summarize) -> ()

Raises ValueError for a false condition, after it has written the values.
Source: tensor_formatter.cc, print_op.cc, assert_op.cc (Fluid 1.8).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define(
    "print(Tensor x, Tensor? lengths, Tensor rng, str name, str message, int first_n, int summarize, str shows, "
    "str phase) -> Tensor"
)
_LIBRARY.define("expect_true(Tensor condition, Tensor[] values, str[] names, str name, int summarize) -> ()")

PHASES = ("forward", "backward", "both")
_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "long", torch.int32: "int"}


def text_of(x: Tensor, name: str, message: str, summarize: int, shows: Sequence[str], lengths: Tensor | None) -> str:
    """Return what is said about a tensor, in lines."""
    lines = [f"Variable: {name}"] if "name" in shows else []
    if message:
        lines.append(f"  - message: {message}")
    if "lod" in shows:
        ends = [] if lengths is None else [0, *lengths.reshape(-1).cumsum(0).tolist()]
        lines.append("  - lod: {" + ("{" + ", ".join(map(str, ends)) + "}" if ends else "") + "}")
    lines.append(f"  - place: {'CPUPlace' if x.device.type == 'cpu' else f'CUDAPlace({x.device.index or 0})'}")
    if "shape" in shows:
        lines.append(f"  - shape: {list(x.shape)}")
    if "layout" in shows:
        lines.append("  - layout: NCHW")
    if "type" in shows:
        lines.append(f"  - dtype: {_TYPES.get(x.dtype, str(x.dtype).removeprefix('torch.'))}")
    flat = x.reshape(-1)
    values = (flat if summarize < 0 else flat[:summarize]).tolist()
    lines.append(f"  - data: [{' '.join(f'{value:g}' for value in values)}]")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stdout.write(text)  # in one call, so that lines of replicas do not mix
    sys.stdout.flush()


def _print(
    x: Tensor,
    lengths: Tensor | None,
    rng: Tensor,
    name: str,
    message: str,
    first_n: int,
    summarize: int,
    shows: str,
    phase: str,
) -> Tensor:
    if phase != "backward" and (first_n <= 0 or int(rng[1]) < first_n):
        _say(text_of(x, name, message, summarize, shows.split(), lengths))
    return x.clone(memory_format=torch.contiguous_format)


def _shape(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.lengths, ctx.rng, *ctx.settings = inputs


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    name, *more, phase = ctx.settings
    if phase != "forward":
        settings = (f"{name}@GRAD", *more, "forward")
        grad = torch.ops.penstock.print(grad, ctx.lengths, ctx.rng, *settings)
    return grad, *([None] * 8)


def _expect_true(condition: Tensor, values: Sequence[Tensor], names: Sequence[str], name: str, summarize: int) -> None:
    if condition.numel() == 1 and bool(condition):
        return
    for value, its_name in zip(values, names, strict=True):
        _say(text_of(value, its_name, "", summarize, ("name", "lod", "shape", "layout", "type"), None))
    raise ValueError(f"penstock.expect_true: the condition {name!r} is {condition.tolist()}; expected one true value")


def _nothing(*operands: Any) -> None:
    """The check returns nothing."""


_LIBRARY.impl("print", _print, "CompositeExplicitAutograd")
_LIBRARY.impl("expect_true", _expect_true, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::print", _shape, lib=_LIBRARY)
torch.library.register_fake("penstock::expect_true", _nothing, lib=_LIBRARY)
torch.library.register_autograd("penstock::print", _derivative, setup_context=_context, lib=_LIBRARY)
