"""`penstock::roi_align`, `penstock::roi_pool`: regions of images in a fixed number of parts.

    roi_align(Tensor x, Tensor boxes, Tensor images, int[] parts, float scale, int samples) -> Tensor
    roi_pool(Tensor x, Tensor boxes, Tensor images, int[] parts, float scale) -> (Tensor, Tensor places)

Shapes: x [n, c, h, w]; boxes [r, 4]: left, top, right, bottom, which `scale` turns into places of x; images int64 [r],
of each box its image; results [r, c, *parts]. Aligned, a part is the mean of `samples` by `samples` places, between
which values are interpolated; of as many as a part has places in each direction, rounded up, if `samples` is not
positive. Pooled, it is the largest value of its places, or 0 of none; `places` int64 has where that is in h w, or -1.
The derivative is that of x.
Source: roi_align_op.h, roi_pool_op.h (Fluid 1.8). Interpolation in two directions is two products of matrices here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_BOXES = "Tensor boxes, Tensor images, int[] parts, float scale, int samples"
_LIBRARY.define(f"roi_align(Tensor x, {_BOXES}) -> Tensor")
_LIBRARY.define(f"roi_align_backward(Tensor grad, Tensor x, {_BOXES}) -> Tensor")
_LIBRARY.define("roi_pool(Tensor x, Tensor boxes, Tensor images, int[] parts, float scale) -> (Tensor, Tensor)")
_LIBRARY.define("roi_pool_backward(Tensor grad, Tensor x, Tensor images, Tensor places) -> Tensor")

_CHUNK = 32  # boxes at a time: what is made of one direction alone is large


def _weights(low: Tensor, high: Tensor, parts: int, size: int, samples: int) -> Tensor:
    """How much each place counts in each part of each box, [r, parts, size], in one direction."""
    whole = (high - low).clamp(min=1.0)
    part = whole / parts
    counts = torch.ceil(part).to(torch.int64) if samples <= 0 else torch.full_like(low, samples, dtype=torch.int64)
    number = torch.arange(int(counts.max()) if len(counts) else 0)
    is_one = number < counts[:, None]
    inside = (number.to(low.dtype) + 0.5) / counts[:, None].to(low.dtype)  # of a part, [r, samples]
    first = low[:, None, None] + torch.arange(parts).to(low.dtype)[None, :, None] * part[:, None, None]
    at = first + inside[:, None, :] * part[:, None, None]  # [r, parts, samples]
    is_seen = is_one[:, None, :] & (at >= -1.0) & (at <= size)
    at = at.clamp(0, size - 1)
    before = at.floor()
    share = torch.where(is_seen, 1.0 / counts[:, None, None].to(low.dtype), torch.zeros((), dtype=low.dtype))
    found = low.new_zeros(len(low), parts, size)
    for place, weight in ((before, 1.0 - (at - before)), ((before + 1).clamp(max=size - 1), at - before)):
        found.scatter_add_(2, place.to(torch.int64), weight * share)
    return found


def _both(x: Tensor, boxes: Tensor, parts: Sequence[int], scale: float, samples: int) -> tuple[Tensor, Tensor]:
    scaled = boxes.to(x.dtype) * scale
    rows = _weights(scaled[:, 1], scaled[:, 3], parts[0], x.shape[2], samples)
    return rows, _weights(scaled[:, 0], scaled[:, 2], parts[1], x.shape[3], samples)


def _of_images(x: Tensor, images: Tensor) -> Iterator[tuple[int, Tensor]]:
    """An image, and the numbers of some of its boxes. Raises ValueError for one that is not there."""
    if len(images) and not 0 <= int(images.min()) <= int(images.max()) < x.shape[0]:
        raise ValueError(f"a box is of image {int(images.max())}; expected 0 to {x.shape[0] - 1}")
    for image in range(x.shape[0]):
        own = (images == image).nonzero().reshape(-1)
        for first in range(0, len(own), _CHUNK):
            yield image, own[first : first + _CHUNK]


def _align(x: Tensor, boxes: Tensor, images: Tensor, parts: Sequence[int], scale: float, samples: int) -> Tensor:
    rows, columns = _both(x, boxes, parts, scale, samples)
    found = x.new_empty(len(boxes), x.shape[1], *parts)
    for image, chosen in _of_images(x, images):
        found[chosen] = torch.einsum("rph,chw,rqw->rcpq", rows[chosen], x[image], columns[chosen])
    return found


def _align_backward(
    grad: Tensor, x: Tensor, boxes: Tensor, images: Tensor, parts: Sequence[int], scale: float, samples: int
) -> Tensor:
    rows, columns = _both(x, boxes, parts, scale, samples)
    found = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for image, chosen in _of_images(x, images):
        found[image] += torch.einsum("rph,rcpq,rqw->chw", rows[chosen], grad[chosen], columns[chosen])
    return found


def _bounds(low: Tensor, high: Tensor, parts: int, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """First place and end of each part of each box, in one direction; bounds are rounded, halves away from zero."""
    first, last = (torch.sign(v) * torch.floor(v.abs() + 0.5) for v in (low, high))
    part = ((last - first + 1).clamp(min=1.0).float() / parts)[:, None]
    number = torch.arange(parts).float()[None, :]
    start, end = torch.floor(number * part), torch.ceil((number + 1) * part)
    found = ((v.to(first.dtype) + first[:, None]).clamp(0, size).to(torch.int64).tolist() for v in (start, end))
    starts, ends = found
    return starts, ends


def _pool(x: Tensor, boxes: Tensor, images: Tensor, parts: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    scaled = boxes.to(x.dtype) * scale
    tops, bottoms = _bounds(scaled[:, 1], scaled[:, 3], parts[0], x.shape[2])
    lefts, rights = _bounds(scaled[:, 0], scaled[:, 2], parts[1], x.shape[3])
    found = x.new_zeros(len(boxes), x.shape[1], *parts)
    places = torch.full(found.shape, -1, dtype=torch.int64)
    for image, chosen in _of_images(x, images):
        for box in chosen.tolist():
            for p, (top, bottom) in enumerate(zip(tops[box], bottoms[box], strict=True)):
                for q, (left, right) in enumerate(zip(lefts[box], rights[box], strict=True)):
                    if top < bottom and left < right:
                        part = x[image, :, top:bottom, left:right].reshape(x.shape[1], -1)
                        found[box, :, p, q], at = part.max(1)
                        width = right - left
                        places[box, :, p, q] = (top + at // width) * x.shape[3] + left + at % width
    return found, places


def _pool_backward(grad: Tensor, x: Tensor, images: Tensor, places: Tensor) -> Tensor:
    found = torch.zeros_like(x, memory_format=torch.contiguous_format).flatten(2)
    is_one = (places >= 0).to(grad.dtype)
    for image, chosen in _of_images(x, images):
        at = places[chosen].clamp(min=0).transpose(0, 1).flatten(1)
        found[image].scatter_add_(1, at, (grad[chosen] * is_one[chosen]).transpose(0, 1).flatten(1))
    return found.reshape(x.shape)


# ---------------------------------------------------------------- shapes, derivatives


def _expect(operator: str, x: Tensor, boxes: Tensor, parts: Sequence[int]) -> None:
    if x.dim() != 4 or boxes.dim() != 2 or boxes.shape[1] != 4 or len(parts) != 2 or min(parts) < 1:
        raise ValueError(
            f"penstock.{operator}: x has shape {list(x.shape)} and boxes {list(boxes.shape)}, in parts of "
            f"{list(parts)}; expected [n, c, h, w], [r, 4] and two positive numbers"
        )


def _align_shape(x: Tensor, boxes: Tensor, images: Tensor, parts: Sequence[int], scale: float, samples: int) -> Tensor:
    _expect("roi_align", x, boxes, parts)
    return x.new_empty([boxes.shape[0], x.shape[1], *parts])


def _pool_shape(x: Tensor, boxes: Tensor, images: Tensor, parts: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    _expect("roi_pool", x, boxes, parts)
    sizes = [boxes.shape[0], x.shape[1], *parts]
    return x.new_empty(sizes), x.new_empty(sizes, dtype=torch.int64)


def _like_x(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _align_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.parts, ctx.scale, ctx.samples = inputs
    ctx.save_for_backward(*tensors)


def _align_derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    settings = (ctx.parts, ctx.scale, ctx.samples)
    made = torch.ops.penstock.roi_align_backward(grad, *ctx.saved_tensors, *settings)
    return made, None, None, None, None, None


def _pool_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, images, *_ = inputs
    ctx.save_for_backward(x, images, output[1])


def _pool_derivative(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return torch.ops.penstock.roi_pool_backward(grad, *ctx.saved_tensors), None, None, None, None


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "roi_align": (_align, _align_shape),
    "roi_align_backward": (_align_backward, _like_x),
    "roi_pool": (_pool, _pool_shape),
    "roi_pool_backward": (_pool_backward, _like_x),
}
for _name, (_kernel, _shape) in _OPERATORS.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"penstock::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("penstock::roi_align", _align_derivative, setup_context=_align_context, lib=_LIBRARY)
torch.library.register_autograd("penstock::roi_pool", _pool_derivative, setup_context=_pool_context, lib=_LIBRARY)
