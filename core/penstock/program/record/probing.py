"""Shapes of calls whose own shape function cannot work with symbols.

Some kernels of torch turn sizes into numbers to find the shapes of their results (resizing images, Fourier transforms,
complex numbers). Such a call is asked for its shapes at a few concrete sizes of each symbol; sizes and strides that lie
on a line through them become expressions, checked at larger, odd and small sizes; where torch refuses a small one, the
kernel will too. No value is computed: the calls run on meta
tensors, or on empty CPU tensors where torch has no meta kernel. Calls that write or return views are not probed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from penstock.compat.torch import disable_current_modes, schema_of, tree_flatten, tree_map, tree_unflatten
from penstock.program.expr import Expr, evaluate
from penstock.program.record.recording import Recording

_BASE, _STEP = 6, 2  # sizes that a kernel accepts although it divides or pads them
_SMALL, _LARGE = (5, 3, 1), 1025
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def probed(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Return fake results of a call, or NotImplemented if its sizes are not linear in the symbols."""
    schema = schema_of(func)
    if any(spec.alias_info is not None for spec in (*schema.arguments, *schema.returns)):
        return NotImplemented
    symbols = _symbols(recording, (args, kwargs))
    points = [dict.fromkeys(symbols, _BASE)]
    points += [{**points[0], symbol: _BASE + _STEP} for symbol in symbols]
    points.append({symbol: _BASE + _STEP * (3 + i) for i, symbol in enumerate(symbols)})
    points.append({symbol: _odd(recording, args) + _STEP * i for i, symbol in enumerate(symbols)})
    answers = [_at(recording, func, args, kwargs, point) for point in points]
    for small in _SMALL:
        point = dict.fromkeys(symbols, small)
        try:
            answers.append(_at(recording, func, args, kwargs, point))
        except (RuntimeError, IndexError, ValueError):
            continue
        points.append(point)
    if any(answer is None for answer in answers):
        return NotImplemented
    flat, structure = tree_flatten(answers[0], is_leaf=_is_layout)
    others = [tree_flatten(answer, is_leaf=_is_layout)[0] for answer in answers[1:]]
    results = [_result(recording, symbols, points, layouts) for layouts in zip(flat, *others, strict=True)]
    return NotImplemented if None in results else tree_unflatten(_fakes(recording, results), structure)


def _odd(recording: Recording, args: Any) -> int:
    """An odd size, a large one unless that would be work for a kernel."""
    tensors = [t for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
    dims = [[recording.symbols.dim(d) for d in t.shape] for t in tensors]
    rows = sum(prod(d for d in shape if not isinstance(d, Expr)) for shape in dims)
    return _LARGE if rows * _LARGE < 1 << 22 and all(sum(isinstance(d, Expr) for d in s) < 2 for s in dims) else 13


def _is_layout(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], torch.dtype)


def _symbols(recording: Recording, operands: Any) -> list[str]:
    found: dict[str, None] = {}

    def look(value: Any) -> None:
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                dim = recording.symbols.dim(size)
                found.update(dict.fromkeys(sorted(dim.symbols()) if isinstance(dim, Expr) else ()))

    tree_map(look, operands)
    return list(found)


def _at(recording: Recording, func: Any, args: Any, kwargs: Any, point: Mapping[str, int]) -> Any:
    """The layouts of the results at concrete sizes; None if torch has no answer."""

    def number(value: Any) -> Any:
        return evaluate(recording.symbols.dim(value), point) if isinstance(value, torch.SymInt) else value

    def call(device: str) -> Any:
        def concrete(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                sizes, strides = [number(d) for d in value.shape], [number(d) for d in value.stride()]
                return torch.empty_strided(sizes, strides, dtype=value.dtype, device=device).zero_()
            return torch.device(device) if isinstance(value, torch.device) else number(value)

        with disable_current_modes(), torch.no_grad():
            return func(*tree_map(concrete, args), **tree_map(concrete, kwargs))

    try:
        out = call("meta")
    except (NotImplementedError, RuntimeError):  # no meta kernel, or one that this call breaks
        out = call("cpu")
    leaves = tree_flatten(out)[0]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return tree_map(lambda t: (tuple(t.shape), tuple(t.stride()), t.dtype), out)


def _result(
    recording: Recording, symbols: Sequence[str], points: Sequence[Mapping[str, int]], layouts: Sequence[_Layout]
) -> Any:
    """(sizes, strides, dtype) with symbols; None if one is on no line."""
    if len({len(layout[0]) for layout in layouts}) > 1:
        return None
    sizes = _lines(recording, symbols, points, [layout[0] for layout in layouts])
    # Where a size is 1, torch may give it any stride.
    regular = len(symbols) + 3
    strides = _lines(recording, symbols, points[:regular], [layout[1] for layout in layouts[:regular]])
    if sizes is not None and strides is None and all(_is_contiguous(layout) for layout in layouts):
        strides = ()  # torch's own
    return None if sizes is None or strides is None else (sizes, strides, layouts[0][2])


def _is_contiguous(layout: _Layout) -> bool:
    return torch.empty(layout[0], device="meta").stride() == layout[1]


def _lines(
    recording: Recording,
    symbols: Sequence[str],
    points: Sequence[Mapping[str, int]],
    found: Sequence[tuple[int, ...]],
) -> tuple[Any, ...] | None:
    lines: list[Any] = []
    count = len(symbols)
    for values in zip(*found, strict=True):
        slopes = [(value - values[0]) / _STEP for value in values[1 : count + 1]]
        start = values[0] - sum(slope * _BASE for slope in slopes)
        drawn = (start + sum(s * point[n] for s, n in zip(slopes, symbols, strict=True)) for point in points)
        if tuple(drawn) != values or any(slope != int(slope) for slope in slopes):
            return None
        line: Any = int(start)
        for slope, symbol in zip(slopes, symbols, strict=True):
            line = line + int(slope) * recording.symbols.size(symbol) if slope else line
        lines.append(line)
    return tuple(lines)


def _fakes(recording: Recording, results: Sequence[Any]) -> list[torch.Tensor]:
    with disable_current_modes(), recording.fake_mode:
        return [
            torch.empty_strided(sizes, strides, dtype=dtype)
            if strides or not sizes
            else torch.empty(sizes, dtype=dtype)
            for sizes, strides, dtype in results
        ]
