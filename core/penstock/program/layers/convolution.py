"""Convolution and pooling of images [n, channels, height, width] and volumes [n, channels, depth, height, width]."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Initializer, Normal, Xavier
from penstock.program.layers.activations import activate
from penstock.program.layers.layouts import takes_channels_last
from penstock.program.layers.results import activated
from penstock.program.layers.windows import Size, each, number, padded
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter


@takes_channels_last
def conv2d(
    input: Any,
    num_filters: int,
    filter_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """Convolve.

    Shapes: input [n, c, h, w], or [n, h, w, c] with data_format="NHWC"; weight [num_filters, c / groups, kh, kw], drawn
    from N(0, 2 / (kh kw c)); bias [num_filters]. `padding`: a number, [h, w], [top, bottom, left, right], "SAME" or
    "VALID".
    Source: fluid.layers.conv2d.
    """
    prefix = name or default_main_program().unique("conv2d")
    _refuse_format(prefix, data_format)
    made = _convolve(
        prefix, 2, input, num_filters, (filter_size, stride, padding, dilation), groups, param_attr, bias_attr
    )
    return activated(made, act, prefix, int(ParamAttr.of(bias_attr) is not None))


@takes_channels_last
def conv3d(
    input: Any,
    num_filters: int,
    filter_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCDHW",
) -> Any:
    """Convolve volumes [n, c, d, h, w]; as `conv2d`. `padding`: also [front, back, top, bottom, left, right].

    Source: fluid.layers.conv3d.
    """
    prefix = name or default_main_program().unique("conv3d")
    _refuse_format(prefix, data_format, "NCDHW")
    made = _convolve(
        prefix, 3, input, num_filters, (filter_size, stride, padding, dilation), groups, param_attr, bias_attr
    )
    return activate(made, act)


Windows = tuple[Size, Size, Size | str, Size]
"""Sizes of filters, steps, padding, dilation."""


def _convolve(
    prefix: str,
    rank: int,
    input: Any,
    num_filters: int,
    windows: Windows,
    groups: int | None,
    param_attr: Any,
    bias_attr: Any,
) -> Any:
    channels, groups = number(input, 1, prefix, rank + 2), groups or 1
    filter_size, stride, padding, dilation = windows
    kernel, steps, holes = (each(size, rank) for size in (filter_size, stride, dilation))
    if channels % groups:
        raise ProgramError(f"{user_line()}: {prefix}: {channels} channels do not divide into {groups} groups")
    default = Normal(0.0, math.sqrt(2.0 / (math.prod(kernel) * channels)))
    with name_scope(prefix):
        shape = [num_filters, channels // groups, *kernel]
        weight, bias = _weights(prefix, shape, input.desc.dtype, num_filters, (param_attr, bias_attr), default)
        input, around = padded(input, padding, kernel, steps, holes, 0.0, prefix)
        function: Any = torch.conv2d if rank == 2 else torch.conv3d
        return function(input, weight, bias, steps, around, holes, groups)


def _weights(
    prefix: str, shape: list[int], dtype: str, num_filters: int, attrs: tuple[Any, Any], default: Initializer
) -> tuple[Any, Any]:
    """The filters and, unless its attribute is False, the bias [num_filters]."""
    wanted, bias_attr = ParamAttr.of(attrs[0]) or ParamAttr(), ParamAttr.of(attrs[1])
    weight = create_parameter(shape, dtype, wanted, default, prefix=prefix, suffix="w_0")
    if bias_attr is None:
        return weight, None
    return weight, create_parameter([num_filters], dtype, bias_attr, Constant(0.0), prefix=prefix, suffix="b_0")


@takes_channels_last
def conv2d_transpose(
    input: Any,
    num_filters: int,
    output_size: Size | None = None,
    filter_size: Size | None = None,
    padding: Size | str = 0,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """Convolve backwards: each input element adds a weighted filter to the result.

    Shapes: input [n, c, h, w]; weight [c, num_filters / groups, kh, kw], Xavier; bias [num_filters]; result
    [n, num_filters, (h - 1) stride - 2 padding + dilation (kh - 1) + 1, …], or `output_size`. Without `filter_size`
    the filter is as large as `output_size` asks. `padding`: a number or [h, w].
    Source: fluid.layers.conv2d_transpose.
    """
    prefix = name or default_main_program().unique("conv2d_transpose")
    _refuse_format(prefix, data_format)
    windows = (filter_size, stride, padding, dilation)
    made = _transposed(prefix, 2, input, num_filters, output_size, windows, groups, (param_attr, bias_attr))
    return activate(made, act)


@takes_channels_last
def conv3d_transpose(
    input: Any,
    num_filters: int,
    output_size: Size | None = None,
    filter_size: Size | None = None,
    padding: Size | str = 0,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCDHW",
) -> Any:
    """Convolve volumes [n, c, d, h, w] backwards; as `conv2d_transpose`. Source: fluid.layers.conv3d_transpose."""
    prefix = name or default_main_program().unique("conv3d_transpose")
    _refuse_format(prefix, data_format, "NCDHW")
    windows = (filter_size, stride, padding, dilation)
    made = _transposed(prefix, 3, input, num_filters, output_size, windows, groups, (param_attr, bias_attr))
    return activate(made, act)


def _transposed(
    prefix: str,
    rank: int,
    input: Any,
    num_filters: int,
    output_size: Size | None,
    windows: tuple[Size | None, Size, Size | str, Size],
    groups: int | None,
    attrs: tuple[Any, Any],
) -> Any:
    filter_size, stride, padding, dilation = windows
    if isinstance(padding, str) or (not isinstance(padding, int) and len(padding) != rank):
        sides = "[height, width]" if rank == 2 else "[depth, height, width]"
        raise ProgramError(f"{user_line()}: {prefix}: padding is {padding!r}; expected a number or {sides}")
    steps, holes, around, groups = each(stride, rank), each(dilation, rank), each(padding, rank), groups or 1
    channels = number(input, 1, prefix, rank + 2)
    sizes = [number(input, 2 + i, prefix, rank + 2) for i in range(rank)] if output_size is not None else []
    wanted = each(output_size, rank) if output_size is not None else []
    if filter_size is None:
        if not wanted:
            raise ProgramError(f"{user_line()}: {prefix}: give filter_size or output_size")
        kernel = [(wanted[i] - (sizes[i] - 1) * steps[i] + 2 * around[i] - 1) // holes[i] + 1 for i in range(rank)]
    else:
        kernel = each(filter_size, rank)
    behind = [
        wanted[i] - ((sizes[i] - 1) * steps[i] - 2 * around[i] + holes[i] * (kernel[i] - 1) + 1)
        for i in range(len(wanted))
    ] or [0] * rank
    if any(not 0 <= behind[i] < max(steps[i], holes[i]) for i in range(rank)):
        raise ProgramError(f"{user_line()}: {prefix}: output_size {wanted} cannot be made by filter {kernel}")
    with name_scope(prefix):
        shape = [channels, num_filters // groups, *kernel]
        weight, bias = _weights(prefix, shape, input.desc.dtype, num_filters, attrs, Xavier())
        function: Any = torch.conv_transpose2d if rank == 2 else torch.conv_transpose3d
        return function(input, weight, bias, steps, around, behind, groups, holes)


@takes_channels_last
def pool2d(
    input: Any,
    pool_size: Size = -1,
    pool_type: str = "max",
    pool_stride: Size = 1,
    pool_padding: Size | str = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCHW",
) -> Any:
    """Pool windows by maximum or average. `exclusive`: an average does not count padding. `data_format`: as `conv2d`.

    Source: fluid.layers.pool2d.
    """
    prefix = name or default_main_program().unique("pool2d")
    _refuse_format(prefix, data_format)
    windows = (pool_size, pool_stride, pool_padding)
    return _pooled(prefix, 2, input, pool_type, windows, global_pooling, ceil_mode, exclusive)


@takes_channels_last
def pool3d(
    input: Any,
    pool_size: Size = -1,
    pool_type: str = "max",
    pool_stride: Size = 1,
    pool_padding: Size | str = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCDHW",
) -> Any:
    """Pool windows of volumes [n, c, d, h, w]; as `pool2d`. Source: fluid.layers.pool3d."""
    prefix = name or default_main_program().unique("pool3d")
    _refuse_format(prefix, data_format, "NCDHW")
    windows = (pool_size, pool_stride, pool_padding)
    return _pooled(prefix, 3, input, pool_type, windows, global_pooling, ceil_mode, exclusive)


def _pooled(
    prefix: str,
    rank: int,
    input: Any,
    pool_type: str,
    windows: tuple[Size, Size, Size | str],
    global_pooling: bool,
    ceil_mode: bool,
    exclusive: bool,
) -> Any:
    _check_type(prefix, pool_type)
    with name_scope(prefix):
        if global_pooling:
            dims = tuple(range(2, rank + 2))
            return input.amax(dims, keepdim=True) if pool_type == "max" else input.mean(dims, keepdim=True)
        kernel, steps, padding = each(windows[0], rank), each(windows[1], rank), windows[2]
        _check_window(prefix, kernel)
        lowest = -math.inf if pool_type == "max" else 0.0
        whole, (input, around) = input, padded(input, padding, kernel, steps, [1] * rank, lowest, prefix)
        if pool_type == "max":
            largest: Any = F.max_pool2d if rank == 2 else F.max_pool3d
            return largest(input, kernel, steps, around, ceil_mode=ceil_mode)
        average: Any = F.avg_pool2d if rank == 2 else F.avg_pool3d
        means = average(input, kernel, steps, around, ceil_mode, not exclusive)
        if input is whole or not exclusive:
            return means
        ones, _ = padded(whole.new_ones([1, 1, *whole.shape[2:]]), padding, kernel, steps, [1] * rank, 0.0, prefix)
        return means / average(ones, kernel, steps, around, ceil_mode)  # of the padding in sight


def adaptive_pool2d(
    input: Any, pool_size: Size, pool_type: str = "max", require_index: bool = False, name: str | None = None
) -> Any:
    """Pool images to the size `pool_size`; with `require_index`, return (maxima, their int32 positions in h w)."""
    return _adapted(name or "adaptive_pool2d", 2, input, pool_size, pool_type, require_index)


def adaptive_pool3d(
    input: Any, pool_size: Size, pool_type: str = "max", require_index: bool = False, name: str | None = None
) -> Any:
    """Pool volumes to the size `pool_size`; with `require_index`, return (maxima, their int32 positions in d h w)."""
    return _adapted(name or "adaptive_pool3d", 3, input, pool_size, pool_type, require_index)


def _adapted(layer: str, rank: int, input: Any, pool_size: Size, pool_type: str, require_index: bool) -> Any:
    _check_type(layer, pool_type)
    number(input, 1, layer, rank + 2)
    sizes = each(pool_size, rank)
    if pool_type == "avg" and require_index:
        raise ProgramError(f"{user_line()}: {layer}: require_index=True needs pool_type='max': an average has no place")
    with name_scope(default_main_program().unique(layer)):
        if pool_type == "avg":
            average: Any = F.adaptive_avg_pool2d if rank == 2 else F.adaptive_avg_pool3d
            return average(input, sizes)
        largest: Any = F.adaptive_max_pool2d if rank == 2 else F.adaptive_max_pool3d
        made, places = largest(input, sizes, return_indices=True)
        return (made, places.to(torch.int32)) if require_index else made


def _check_type(prefix: str, pool_type: str) -> None:
    if pool_type not in ("max", "avg"):
        raise ProgramError(f"{user_line()}: {prefix}: pool_type is {pool_type!r}; expected 'max' or 'avg'")


def _refuse_format(prefix: str, data_format: str, expected: str = "NCHW") -> None:
    if data_format != expected:
        raise ProgramError(
            f"{user_line()}: {prefix}: data_format is {data_format!r}; expected {expected!r}, or "
            f"{expected[0]}{expected[2:]}C for channels that come last"
        )


def _check_window(prefix: str, kernel: list[int]) -> None:
    if min(kernel) < 1:
        raise ProgramError(f"{user_line()}: {prefix}: pool_size is {kernel}; give a size, or global_pooling=True")
