"""Deformable convolution: filters whose elements look at places of their own, which another layer predicts.

Source: fluid.layers.deformable_conv, deformable_conv_op.h, deformable_conv_v1_op.h (Fluid 1.8).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Normal
from penstock.program.layers.expected import expect_known, expect_rank
from penstock.program.layers.windows import Size, each
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter


def deformable_conv(
    input: Any,
    offset: Any,
    mask: Any,
    num_filters: int,
    filter_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int | None = None,
    deformable_groups: int | None = None,
    im2col_step: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    modulated: bool = True,
    name: str | None = None,
) -> Any:
    """Convolve, with each element of a filter `offset` away from its place, times `mask` unless it is not `modulated`.

    Shapes: input [n, c, h, w]; offset [n, 2 g kh kw, h', w'] with g = `deformable_groups` (1), of each element the way
    down and then across, in pixels; mask [n, g kh kw, h', w']; weight [num_filters, c / groups, kh, kw], drawn from
    N(0, 2 / (kh kw c)); bias [num_filters]; result [n, num_filters, h', w']. Between pixels values are interpolated;
    outside of the image they are 0. `im2col_step` has no effect. Raises ProgramError for sizes that do not fit.
    """
    prefix = name or default_main_program().unique("deformable_conv")
    parts, groups = deformable_groups or 1, groups or 1
    expect_rank(prefix, input, 4)
    channels, *sides = (expect_known(prefix, input, axis) for axis in (1, 2, 3))
    if channels % groups or channels % parts or num_filters % groups:
        raise ProgramError(
            f"{user_line()}: {prefix}: {channels} channels and {num_filters} filters do not divide into {groups} "
            f"groups and {parts} deformable groups"
        )
    kernel, windows = each(filter_size, 2), [each(size, 2) for size in (stride, padding, dilation)]
    made = [
        (side + 2 * around - hole * (size - 1) - 1) // step + 1
        for side, size, step, around, hole in zip(sides, kernel, *windows, strict=True)
    ]
    _expect_sizes(prefix, "offset", offset, [2 * parts * math.prod(kernel), *made])
    with name_scope(prefix):
        weight = create_parameter(
            [num_filters, channels // groups, *kernel], input.desc.dtype, ParamAttr.of(param_attr) or ParamAttr(),
            Normal(0.0, math.sqrt(2.0 / (math.prod(kernel) * channels))), prefix=prefix, suffix="w_0",
        )  # fmt: skip
        seen = _seen(input, _places(offset, kernel, windows, sides, parts), parts)
        if modulated:
            _expect_sizes(prefix, "mask", mask, [parts * math.prod(kernel), *made])
            seen = seen * mask.unflatten(1, (parts, math.prod(kernel))).unsqueeze(2)
        columns = seen.reshape([-1, groups, channels // groups * math.prod(kernel), math.prod(made)])
        rows: Any = torch.matmul(weight.reshape([groups, num_filters // groups, -1]), columns)
        result = rows.reshape([-1, num_filters, *made])
        if (wanted := ParamAttr.of(bias_attr)) is None:
            return result
        bias: Any = create_parameter(
            [num_filters], input.desc.dtype, wanted, Constant(0.0), prefix=prefix, suffix="b_0"
        )
        return result + bias.reshape([num_filters, 1, 1])


def _expect_sizes(prefix: str, what: str, x: Any, sizes: list[int]) -> None:
    expect_rank(prefix, x, 4)
    known = [expect_known(prefix, x, axis) for axis in (1, 2, 3)]
    if known != sizes:
        raise ProgramError(
            f"{user_line()}: {prefix}: {what} is {x!r}; expected {sizes} behind the batch", variable=x.name
        )


def _places(offset: Any, kernel: list[int], windows: list[list[int]], sides: list[int], parts: int) -> list[Any]:
    """What each element looks at, pixels down and pixels across, [n, parts, kh, kw, h', w'] each; -2 beyond the image.

    The whole numbers are added first: without offsets places are whole, to the bit.
    """
    ways, found = offset.unflatten(1, (parts, *kernel, 2)), []
    for axis in (0, 1):
        step, around, hole = (window[axis] for window in windows)
        way = ways.select(4, axis)
        starts = _counted(offset, way.shape[4 + axis]) * step - around
        taps = _counted(offset, kernel[axis]) * hole
        found.append(way + (taps.reshape([-1, *[1] * (3 - axis)]) + starts.reshape([-1, *[1] * (1 - axis)])))
    near = [(place > -1.0) & (place < side) for place, side in zip(found, sides, strict=True)]
    is_beyond = torch.logical_not(near[0] & near[1])
    return [place.masked_fill(is_beyond, -2.0) for place in found]


def _counted(like: Any, count: int) -> Any:
    return like.detach().new_ones([count]).cumsum(0) - 1.0


def _seen(input: Any, places: list[Any], parts: int) -> Any:
    """The values at the places, [n, parts, c / parts, kh kw, h', w'], each from the four pixels around it.

    Not torch's grid_sample: it takes places as parts of a side and multiplies them out again, which makes -3e-8 of 0,
    and so the slope before a pixel of the one after it.
    """
    channels, height, width = input.desc.shape[1:]
    _, _, *taps, rows, columns = places[0].shape
    own = input.reshape([-1, parts, channels // parts, height * width])
    around = [_around(place, side) for place, side in zip(places, (height, width), strict=True)]
    found: Any = 0.0
    for row, down in around[0]:
        for column, across in around[1]:
            at = (row * width + column).reshape([-1, parts, 1, math.prod(taps) * rows * columns])
            values = torch.gather(own, 3, at.expand([-1, -1, channels // parts, -1]))
            found = found + values * (down * across).reshape(at.shape)
    return found.reshape([-1, parts, channels // parts, math.prod(taps), rows, columns])


def _around(place: Any, side: int) -> list[tuple[Any, Any]]:
    """The pixels before and after a place, as (index, weight); of one outside of the image, any index and 0."""
    before = place.detach().floor()
    rest, found = place - before, []
    for pixel, weight in ((before, 1.0 - rest), (before + 1.0, rest)):
        is_outside = (pixel < 0.0) | (pixel >= side)
        found.append((pixel.clamp(0.0, side - 1.0).to(torch.int64), weight.masked_fill(is_outside, 0.0)))
    return found


__all__ = ["deformable_conv"]
