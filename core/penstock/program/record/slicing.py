"""Sizes of slices along a dimension whose size is a symbol.

torch asks whether `x[:20]` lies within the size that it sees while recording; a batch that is fed may be smaller. Here
the size is `min(20, s0)`, as the kernel cuts it. A position that is computed from sizes (`x[: n - 2]`) counts from the
end where it is negative: its sign is kept as a guard.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from penstock.compat.torch import statically_known_true
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Guard
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line

_slice = torch.ops.aten.slice.Tensor
_sym_max: Any = torch.sym_max
_sym_min: Any = torch.sym_min


def sliced(recording: Recording, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Return the fake result of aten::slice; for sizes that are numbers it is torch's own."""
    dim = dim % x.dim() if x.dim() else 0
    given = (start, end, step)
    if x.dim() == 0 or not any(isinstance(v, torch.SymInt) for v in (x.shape[dim], *given)):
        return _slice(x, dim, *given)
    size = x.shape[dim]
    low = _position(recording, 0 if start is None else start, size)
    to_end = end is None or statically_known_true(end == sys.maxsize)
    if to_end and isinstance(start, int) and start < 0:
        length = _lower(recording, size, -start)
    else:
        high = size if to_end else _position(recording, end, size)
        high = high if isinstance(end, int) and end < 0 else _lower(recording, high, size)
        length = high - low if statically_known_true(high >= low) else _sym_max(high - low, 0)
    _expect_rows(recording, length)
    sizes, strides = list(x.shape), list(x.stride())
    offset = x.storage_offset() + _lower(recording, low, size) * strides[dim]
    sizes[dim], strides[dim] = length if _is(step, 1) else (length + step - 1) // step, strides[dim] * step
    return x.as_strided(sizes, strides, offset)


def _position(recording: Recording, index: Any, size: Any) -> Any:
    """Where an index points, at least 0."""
    if isinstance(index, torch.SymInt) and not statically_known_true(index >= 0):
        from_start = bool(index >= 0)
        recording.add_guards([Guard(recording.symbols.dim(index), ">=" if from_start else "<", 0, user_line())])
    else:
        from_start = bool(index >= 0)
    return index if from_start else _sym_max(size + index, 0)


def _expect_rows(recording: Recording, length: Any) -> None:
    """torch's symbols are positive, so that it takes `max(0, s0 - 1)` for `s0 - 1`: guard it against no row."""
    dim = recording.symbols.dim(length)
    if isinstance(dim, Expr) and dim.evaluate(dict.fromkeys(dim.symbols(), 0)) < 0:
        recording.add_guards([Guard(dim, ">=", 0, user_line())])


def _lower(recording: Recording, left: Any, right: Any) -> Any:
    if statically_known_true(left <= right) or _never_above(recording.symbols.dim(left), recording.symbols.dim(right)):
        return left
    return right if statically_known_true(right <= left) else _sym_min(left, right)


def _never_above(left: Dim, right: Dim) -> bool:
    """Whether `left <= right` for every size, which torch does not know of `(s0 + 1) // 2` and s0; else False.

    Both are of one symbol, with small constants and without `min` and `max`, so that what holds for a few hundred sizes
    and for large ones holds for all: their rounding repeats itself.
    """
    if not (isinstance(left, Expr) and isinstance(right, Expr) and _is_plain(left) and _is_plain(right)):
        return False
    symbols = left.symbols() | right.symbols()
    points = (dict.fromkeys(symbols, n) for n in (*range(300), 1 << 20, (1 << 20) + 1))
    return len(symbols) == 1 and all(left.evaluate(p) <= right.evaluate(p) for p in points)


def _is_plain(size: Expr) -> bool:
    def small(part: Expr | int | str) -> bool:
        return _is_plain(part) if isinstance(part, Expr) else isinstance(part, str) or abs(part) <= 16

    return size.op not in ("min", "max") and all(map(small, size.args))


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number
