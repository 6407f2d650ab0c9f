"""Normalisations."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Normal
from penstock.program.layers.activations import activate
from penstock.program.layers.layouts import takes_channels_last
from penstock.program.layers.results import activated, result
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter, create_persistable


@takes_channels_last
def batch_norm(
    input: Any,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Any:
    """Normalise each channel over the batch of this replica, then scale and shift.

    Running statistics are buffers: `running = momentum * running + (1 - momentum) * batch`, one set a replica,
    replica 0's are saved. The running variance is the unbiased one (torch's; Fluid keeps the biased one).
    Shapes: input [n, c, ...], or [n, ..., c] with data_layout="NHWC"; scale, shift, mean and variance [c].
    Source: fluid.layers.batch_norm.
    """
    prefix = name or default_main_program().unique("batch_norm")
    if data_layout != "NCHW" or input.ndim < 2 or not isinstance(input.desc.shape[1], int):
        raise ProgramError(
            f"{user_line()}: {prefix}: input {input!r} with layout {data_layout!r}; expected [n, channels, ...], 'NCHW'"
        )
    size, dtype = [input.desc.shape[1]], input.desc.dtype
    with name_scope(prefix):
        scale = _parameter(size, dtype, param_attr, 1.0, prefix, "w_0")
        shift = _parameter(size, dtype, bias_attr, 0.0, prefix, "b_0")
        mean = _running(moving_mean_name, f"{prefix}.mean", size, dtype, 0.0)
        variance = _running(moving_variance_name, f"{prefix}.variance", size, dtype, 1.0)
        training = not (is_test or use_global_stats)
        statistics: tuple[Any, Any] = (mean, variance)
        out = torch.batch_norm(input, scale, shift, *statistics, training, 1.0 - momentum, epsilon, False)
        if in_place:  # its output has the input's name in Fluid
            return result(activate(out, act), prefix, 2) if act else out
        return activated(out, act, prefix, 2)  # after the mean and variance of the batch


def _running(given: str | None, name: str, size: list[int], dtype: str, first: float) -> Any:
    """A running statistic; of programs that share a startup program, one with a name of the user's is the same."""
    main = default_main_program()
    if given is not None and given in main.variables:
        return main.handle(given)
    return create_persistable(given or name, size, dtype, Constant(first), shared=given is not None)


@takes_channels_last
def group_norm(
    input: Any,
    groups: int,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    data_layout: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Normalise the channels of each group of each row, then scale and shift each channel.

    Shapes: input [n, c, ...]; scale and shift [c].  Source: fluid.layers.group_norm.
    """
    prefix = name or default_main_program().unique("group_norm")
    channels = input.desc.shape[1] if input.ndim > 1 else None
    if data_layout != "NCHW" or not isinstance(channels, int) or groups < 1 or channels % groups:
        raise ProgramError(
            f"{user_line()}: {prefix}: input {input!r} with layout {data_layout!r} and {groups} groups; expected "
            "[n, channels, ...], 'NCHW', and a number of groups that divides the channels"
        )
    dtype = input.desc.dtype
    with name_scope(prefix):
        scale = _parameter([channels], dtype, param_attr, 1.0, prefix, "w_0")
        shift = _parameter([channels], dtype, bias_attr, 0.0, prefix, "b_0")
        return activate(F.group_norm(input, groups, scale, shift, epsilon), act)


def instance_norm(
    input: Any, epsilon: float = 1e-05, param_attr: Any = None, bias_attr: Any = None, name: str | None = None
) -> Any:
    """Normalise each channel of each row, then scale and shift each channel.

    Shapes: input [n, c, ...], of three dimensions or more; scale and shift [c].  Source: fluid.layers.instance_norm.
    """
    prefix = name or default_main_program().unique("instance_norm")
    channels = input.desc.shape[1] if input.ndim > 2 else None
    if not isinstance(channels, int):
        raise ProgramError(f"{user_line()}: {prefix}: input {input!r}; expected [n, channels, ...] of known channels")
    dtype = input.desc.dtype
    with name_scope(prefix):
        scale = _parameter([channels], dtype, param_attr, 1.0, prefix, "w_0")
        shift = _parameter([channels], dtype, bias_attr, 0.0, prefix, "b_0")
        return F.group_norm(input, channels, scale, shift, epsilon)


def spectral_norm(weight: Any, dim: int = 0, power_iters: int = 1, eps: float = 1e-12, name: str | None = None) -> Any:
    """Return a weight divided by its largest singular value, of its matrix with the rows along `dim`.

    The value is approached by `power_iters` rounds from two vectors that are drawn once and do not change, and through
    which no gradient goes.  Source: fluid.layers.spectral_norm, spectral_norm_op.h.
    """
    prefix = name or default_main_program().unique("spectral_norm")
    sizes = list(weight.desc.shape)
    if (
        len(sizes) < 2
        or not 0 <= dim < len(sizes)
        or not all(isinstance(size, int) for size in sizes)
        or power_iters < 0
    ):
        raise ProgramError(
            f"{user_line()}: {prefix}: weight {weight!r}, dim={dim}, power_iters={power_iters}; expected two or more "
            "known sizes, one of these dimensions, and 0 or more"
        )
    with name_scope(prefix):
        dtype, rows = weight.desc.dtype, sizes[dim]
        matrix = weight.movedim(dim, 0).reshape([rows, -1])
        left = create_persistable(f"{prefix}.w_0", [rows], dtype, Normal(0.0, 1.0))
        right = create_persistable(f"{prefix}.w_1", [math.prod(sizes) // rows], dtype, Normal(0.0, 1.0))
        with torch.no_grad():
            u: Any = left
            v: Any = right
            for _ in range(power_iters):
                v = matrix.t().mv(u)
                v = v / (v.norm() + eps)
                u = matrix.mv(v)
                u = u / (u.norm() + eps)
        return weight / (u * matrix.mv(v)).sum()


def layer_norm(
    input: Any,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Normalise each row over its dimensions from `begin_norm_axis` on; scale and shift are flat.

    Source: fluid.layers.layer_norm.
    """
    prefix = name or default_main_program().unique("layer_norm")
    sizes = list(input.desc.shape[begin_norm_axis:])
    if not sizes or not all(isinstance(d, int) for d in sizes):
        raise ProgramError(f"{user_line()}: {prefix}: the sizes of {input!r} from {begin_norm_axis} on must be numbers")
    flat, dtype = [math.prod(sizes)], input.desc.dtype
    with name_scope(prefix):
        gain = _parameter(flat, dtype, param_attr, 1.0, prefix, "w_0") if scale else None
        bias = _parameter(flat, dtype, bias_attr, 0.0, prefix, "b_0") if shift else None
        if len(sizes) > 1:
            gain, bias = (None if p is None else p.reshape(sizes) for p in (gain, bias))
        return activated(F.layer_norm(input, sizes, gain, bias, epsilon), act, prefix, 2)


def _parameter(shape: list[int], dtype: str, attr: Any, start: float, prefix: str, suffix: str) -> Any:
    """A scale or a shift; None if its attribute is False."""
    wanted = ParamAttr.of(attr)
    if wanted is None:
        return None
    return create_parameter(shape, dtype, wanted, Constant(start), prefix=prefix, suffix=suffix)


def lrn(
    input: Any, n: int = 5, k: float = 1.0, alpha: float = 1e-4, beta: float = 0.75, name: str | None = None
) -> Any:
    """Divide by (k + alpha * sum of squares over n neighbouring channels) ** beta. Shape: [n, c, h, w]."""
    with name_scope(name or default_main_program().unique("lrn")):
        before = (n - 1) // 2
        squares = F.pad(input * input, (0, 0, 0, 0, before, n - 1 - before))
        channels = input.shape[1]
        total = squares.narrow(1, 0, channels)
        for offset in range(1, n):
            total = total + squares.narrow(1, offset, channels)
        return input / (k + alpha * total) ** beta


def l2_normalize(x: Any, axis: int, epsilon: float = 1e-12, name: str | None = None) -> Any:
    """Return x / sqrt(sum of squares along `axis` + epsilon)."""
    with name_scope(name or default_main_program().unique("l2_normalize")):
        return x / ((x * x).sum(axis, keepdim=True) + epsilon).sqrt()
