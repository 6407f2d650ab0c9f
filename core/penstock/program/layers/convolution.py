"""Convolution and pooling of images [n, channels, height, width]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Normal, Xavier
from penstock.program.layers.activations import activate
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter

Size = int | Sequence[int]


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

    Shapes: input [n, c, h, w]; weight [num_filters, c / groups, kh, kw], drawn from N(0, 2 / (kh kw c)); bias
    [num_filters]. `padding`: a number, [h, w], [top, bottom, left, right], "SAME" or "VALID".
    Source: fluid.layers.conv2d.
    """
    prefix = name or default_main_program().unique("conv2d")
    _refuse_format(prefix, data_format)
    channels = _number(input, 1, prefix)
    kernel, groups = _pair(filter_size), groups or 1
    if channels % groups:
        raise ProgramError(f"{user_line()}: {prefix}: {channels} channels do not divide into {groups} groups")
    weight_attr, bias_attr = ParamAttr.of(param_attr) or ParamAttr(), ParamAttr.of(bias_attr)
    default = Normal(0.0, math.sqrt(2.0 / (kernel[0] * kernel[1] * channels)))
    shape, dtype = [num_filters, channels // groups, *kernel], input.desc.dtype
    with name_scope(prefix):
        weight: Any = create_parameter(shape, dtype, weight_attr, default, prefix=prefix, suffix="w_0")
        bias: Any = None
        if bias_attr is not None:
            bias = create_parameter([num_filters], dtype, bias_attr, Constant(0.0), prefix=prefix, suffix="b_0")
        steps, holes = _pair(stride), _pair(dilation)
        input, around = _padded(input, padding, kernel, steps, holes, 0.0, prefix)
        return activate(torch.conv2d(input, weight, bias, steps, around, holes, groups), act)


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
    if isinstance(padding, str) or (not isinstance(padding, int) and len(padding) != 2):
        raise ProgramError(f"{user_line()}: {prefix}: padding is {padding!r}; expected a number or [height, width]")
    steps, holes, around, groups = _pair(stride), _pair(dilation), _pair(padding), groups or 1
    sizes = [_number(input, 2 + i, prefix) for i in range(2)] if output_size is not None else []
    wanted = _pair(output_size) if output_size is not None else []
    if filter_size is None:
        if not wanted:
            raise ProgramError(f"{user_line()}: {prefix}: give filter_size or output_size")
        kernel = [(wanted[i] - (sizes[i] - 1) * steps[i] + 2 * around[i] - 1) // holes[i] + 1 for i in range(2)]
    else:
        kernel = _pair(filter_size)
    behind = [
        wanted[i] - ((sizes[i] - 1) * steps[i] - 2 * around[i] + holes[i] * (kernel[i] - 1) + 1)
        for i in range(len(wanted))
    ] or [0, 0]
    if any(not 0 <= behind[i] < max(steps[i], holes[i]) for i in range(2)):
        raise ProgramError(f"{user_line()}: {prefix}: output_size {wanted} cannot be made by filter {kernel}")
    weight_attr, bias_attr = ParamAttr.of(param_attr) or ParamAttr(), ParamAttr.of(bias_attr)
    shape, dtype = [_number(input, 1, prefix), num_filters // groups, *kernel], input.desc.dtype
    with name_scope(prefix):
        weight: Any = create_parameter(shape, dtype, weight_attr, Xavier(), prefix=prefix, suffix="w_0")
        bias: Any = None
        if bias_attr is not None:
            bias = create_parameter([num_filters], dtype, bias_attr, Constant(0.0), prefix=prefix, suffix="b_0")
        made = torch.conv_transpose2d(input, weight, bias, steps, around, behind, groups, holes)
        return activate(made, act)


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
    """Pool windows by maximum or average. `exclusive`: an average does not count padding.

    Source: fluid.layers.pool2d.
    """
    prefix = name or default_main_program().unique("pool2d")
    _refuse_format(prefix, data_format)
    if pool_type not in ("max", "avg"):
        raise ProgramError(f"{user_line()}: {prefix}: pool_type is {pool_type!r}; expected 'max' or 'avg'")
    with name_scope(prefix):
        if global_pooling:
            return input.amax((2, 3), keepdim=True) if pool_type == "max" else input.mean((2, 3), keepdim=True)
        kernel, steps = _pair(pool_size), _pair(pool_stride)
        _check_window(prefix, kernel, pool_padding, pool_type == "avg" and exclusive)
        lowest = -math.inf if pool_type == "max" else 0.0
        input, around = _padded(input, pool_padding, kernel, steps, [1, 1], lowest, prefix)
        if pool_type == "max":
            return F.max_pool2d(input, kernel, steps, around, ceil_mode=ceil_mode)
        return F.avg_pool2d(input, kernel, steps, around, ceil_mode, not exclusive)


def _refuse_format(prefix: str, data_format: str) -> None:
    if data_format != "NCHW":
        raise ProgramError(
            f"{user_line()}: {prefix}: data_format is {data_format!r}; only 'NCHW' is supported. Transpose the input"
        )


def _check_window(prefix: str, kernel: list[int], padding: Size | str, exclusive: bool) -> None:
    if min(kernel) < 1:
        raise ProgramError(f"{user_line()}: {prefix}: pool_size is {kernel}; give a size, or global_pooling=True")
    if exclusive and (padding == "SAME" or (not isinstance(padding, str) and len(_pair(padding)) == 4)):
        raise ProgramError(
            f"{user_line()}: {prefix}: an exclusive average needs equal padding on both sides; got {padding!r}"
        )


def _number(x: Any, position: int, prefix: str) -> int:
    size = x.desc.shape[position] if x.ndim == 4 else None
    if not isinstance(size, int):
        raise ProgramError(
            f"{user_line()}: {prefix}: input {x!r} must have four dimensions and a known size at {position}"
        )
    return size


def _pair(value: Size) -> list[int]:
    return [int(value)] * 2 if isinstance(value, int) else [int(v) for v in value]


def _padded(
    x: Any, padding: Size | str, kernel: list[int], stride: list[int], dilation: list[int], fill: float, prefix: str
) -> tuple[Any, list[int]]:
    """Return (x, padding that the kernel takes itself); uneven padding is recorded before it."""
    if padding == "VALID":
        return x, [0, 0]
    if isinstance(padding, str):
        if padding != "SAME":
            raise ProgramError(f"{user_line()}: {prefix}: padding is {padding!r}; expected numbers, 'SAME' or 'VALID'")
        sides = [
            _same(_number(x, 2 + i, prefix), stride[i], (kernel[i] - 1) * dilation[i] + 1) for i in range(2)
        ]  # fmt: skip
    else:
        sizes = _pair(padding)
        if len(sizes) not in (2, 4):
            raise ProgramError(f"{user_line()}: {prefix}: padding is {padding}; expected a number, two or four of them")
        sides = [(sizes[0], sizes[0]), (sizes[1], sizes[1])] if len(sizes) == 2 else [
            (sizes[0], sizes[1]), (sizes[2], sizes[3])
        ]  # fmt: skip
    if all(low == high for low, high in sides):
        return x, [low for low, _ in sides]
    (top, bottom), (left, right) = sides
    return F.pad(x, (left, right, top, bottom), value=fill), [0, 0]


def _same(size: int, stride: int, reach: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2
