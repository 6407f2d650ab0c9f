"""Slices whose bounds are variables: `x[:, i:j]`.

Bounds that follow from sizes (`layers.shape(x)[1] - 1`, constants) make a slice of the Program as numbers do. Where
both follow from data and are a constant apart (`x[i : i + 2]`, i the counter of a loop), the elements are gathered,
which they have to be within x for. How many a result has else is known in the run only, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.record.elements import distance, elements_of
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line

Call = Callable[[Any, Any, dict[str, Any]], Any]


def with_known_bounds(x: Any, index: Any, call: Call) -> tuple[Any, Any]:
    """Return a variable and an index without variables for bounds, which together give x[index].

    `call`: records a torch function. Raises ProgramError for bounds of which it is not known how far apart they are.
    """
    if not _has_bounds(index):
        return x, index
    recording: Recording = x._recording
    parts, dims = _in_full(index, x.ndim)
    for at, dim in dims.items():
        part = parts[at]
        if isinstance(part, slice):
            start, stop = (_known(recording, x, bound) for bound in (part.start, part.stop))
            if _is_variable(start) or _is_variable(stop):
                x, parts[at] = _gathered(recording, x, dim, (start, stop, part.step), call), slice(None)
            else:
                parts[at] = slice(start, stop, _known(recording, x, part.step))
    return x, tuple(parts)


def _has_bounds(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    slices = [part for part in parts if isinstance(part, slice)]
    return any(_is_variable(bound) for part in slices for bound in (part.start, part.stop, part.step))


def _in_full(index: Any, ndim: int) -> tuple[list[Any], dict[int, int]]:
    """The parts of an index with `...` written out, and the dimension of x that each is of."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    at = next((n for n, part in enumerate(parts) if part is Ellipsis), None)
    if at is not None:
        parts[at : at + 1] = [slice(None)] * (ndim - used)
    places = [n for n, part in enumerate(parts) if part is not None]
    return parts, dict(zip(places, range(len(places)), strict=True))


def _is_variable(bound: Any) -> bool:
    return hasattr(bound, "fake")


def _known(recording: Recording, x: Any, bound: Any) -> Any:
    """A bound as a number or size; a variable that follows from data as it is. Raises ProgramError for no number."""
    if not _is_variable(bound):
        return bound
    found = elements_of(recording, bound.name)
    if found is not None and len(found) == 1:
        return found[0]
    if any(size != 1 for size in bound.desc.shape) or bound.fake.is_floating_point():
        raise ProgramError(
            f"{user_line()}: {x.name!r} is sliced by {bound!r}; expected an integer with one element",
            variable=bound.name,
        )
    return bound


def _gathered(recording: Recording, x: Any, dim: int, bounds: tuple[Any, Any, Any], call: Call) -> Any:
    start, stop, step = bounds
    apart = distance(recording, start.name, stop.name) if _is_variable(start) and _is_variable(stop) else None
    if apart is None or apart < 0 or step not in (None, 1):
        raise ProgramError(
            f"{user_line()}: {x.name!r} is sliced from {start!r} to {stop!r}, which follow from data, so that only a "
            "run knows how many elements there are. Bounds may follow from sizes (layers.shape(x)[1] - 1), or both "
            "from one variable (x[:, i : i + 2]), the first the lower one, which nothing writes in between",
            variable=x.name,
        )
    if not apart:
        return call(torch.narrow, (x, dim, 0, 0), {})
    first = call(torch.Tensor.reshape, (start, [1]), {})
    rest = [call(torch.Tensor.__add__, (first, more), {}) for more in range(1, apart)]
    positions = call(torch.cat, ([first, *rest],), {}) if rest else first
    return call(torch.index_select, (x, dim, positions), {})
