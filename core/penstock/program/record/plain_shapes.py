"""Shapes of the calls of convolutional networks, without torch's functions for them.

These are in Python and import sympy, half a second of a process. Here are contiguous operands whose sizes are numbers,
but for the batch. torch finds all others, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.program.record import arithmetic
from penstock.program.record.arithmetic import Size
from penstock.program.record.fakes import Fake
from penstock.program.record.sizes import size_of

aten = torch.ops.aten
Result = tuple[tuple[Size, ...], torch.dtype]
Results = list[Result | None]
"""Sizes and dtype of each result, which is contiguous; None: the call does not make it."""


def _convolution(
    x: Fake, weight: Fake, bias: Fake | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, _: Any, groups: int,
) -> Results | None:  # fmt: skip
    places = _places(x, list(weight.shape[2:]), stride, padding, dilation)
    if transposed or places is None or weight.dim() != x.dim() or not _channels_fit(x, weight, groups):
        return None
    operands = [x, weight] if bias is None else [x, weight, bias]
    if not all(_is_plain(one) and one.dtype == x.dtype for one in operands):
        return None
    if bias is not None and _sizes(bias) != _sizes(weight)[:1]:
        return None
    return [((size_of(x.shape[0]), size_of(weight.shape[0]), *places), x.dtype)]


def _convolution_backward(
    gradient: Fake, x: Fake, weight: Fake, _: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, more: Any, groups: int, mask: Sequence[bool],
) -> Results | None:  # fmt: skip
    made = _convolution(x, weight, None, stride, padding, dilation, transposed, more, groups)
    if made is None or not _is_plain(gradient) or made[0] != (_sizes(gradient), gradient.dtype):
        return None
    each = (_sizes(x), _sizes(weight), _sizes(weight)[:1])
    return [(sizes, x.dtype) if wanted else None for sizes, wanted in zip(each, mask, strict=True)]


def _relu(x: Fake) -> Results | None:
    return [(_sizes(x), x.dtype)] if _is_plain(x) and x.dtype.is_floating_point else None


def _max_pool(
    x: Fake, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> Results | None:  # fmt: skip
    both = [[*one, *one][:2] for one in (kernel, stride or kernel, padding, dilation)]
    places = None if ceil_mode or x.dim() != 4 else _places(x, both[0], *both[1:])
    if places is None or not _is_plain(x) or any(2 * pad > size for pad, size in zip(both[2], both[0], strict=True)):
        return None
    sizes = (*_sizes(x)[:2], *places)
    return [(sizes, x.dtype), (sizes, torch.int64)]


def _as_the_second(gradient: Fake, x: Fake, *_: Any) -> Results | None:
    return [(_sizes(x), x.dtype)] if _is_plain(gradient) and _is_plain(x) and gradient.dtype == x.dtype else None


def _alike(gradient: Fake, x: Fake, *_: Any) -> Results | None:
    return _as_the_second(gradient, x) if _sizes(gradient) == _sizes(x) else None


PLAIN: dict[Any, Callable[..., Results | None]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.relu.default: _relu,
    aten.threshold_backward.default: _alike,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _as_the_second,
    aten.avg_pool2d_backward.default: _as_the_second,
}
"""Of a call's operands, in the order of its schema; None: torch has to find them."""


def _sizes(fake: Fake) -> tuple[Size, ...]:
    return tuple(size_of(n) for n in fake.shape)


def _is_plain(fake: Fake) -> bool:
    """Whether a tensor is contiguous for every batch."""
    return [size_of(n) for n in fake.stride()] == arithmetic.contiguous_strides(_sizes(fake))


def _channels_fit(x: Fake, weight: Fake, groups: int) -> bool:
    """Whether the channels of both are numbers, and agree."""
    given, made, of_group = (size_of(n).number for n in (x.shape[1], *weight.shape[:2]))
    if given is None or made is None or of_group is None:
        return False
    return groups > 0 and given == of_group * groups and made > 0 and made % groups == 0


def _places(
    x: Fake, kernel: Sequence[Any], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Size] | None:
    """How many places a kernel has along each dimension; None if that is not known, or a call that torch refuses."""
    dims, numbers = x.dim() - 2, (*stride, *padding, *dilation)
    if not 1 <= dims <= 3 or any(len(each) != dims for each in (kernel, stride, padding, dilation)):
        return None
    if not all(isinstance(number, int) for number in numbers):
        return None
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        return None
    found = []
    for i in range(dims):
        size, width = size_of(x.shape[2 + i]).number, size_of(kernel[i]).number
        if size is None or width is None:
            return None
        left = size + 2 * padding[i] - dilation[i] * (width - 1) - 1
        found.append(arithmetic.constant(left // stride[i] + 1))
        if left < 0 or width < 1:
            return None
    return found
