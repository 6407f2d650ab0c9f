"""Layers of models that predict clicks: `data_norm` and `continuous_value_model`.

Source: python/paddle/fluid/layers/nn.py, data_norm_op.cu, cvm_op.h (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.layers.activations import activate
from penstock.program.layers.expected import expect_features
from penstock.program.layers.sequences import is_sequence, sequence_expand_as
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import record_call, recording_modes
from penstock.program.training.parameters import ParamAttr, create_parameter

_STATISTICS = {
    "batch_size": ("batch_size", 1e4),
    "batch_sum": ("batch_sum", 0.0),
    "batch_square_sum": ("batch_square", 1e4),
}


def data_norm(
    input: Any,
    act: str | None = None,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    slot_dim: int = -1,
    sync_stats: bool = False,
    summary_decay_rate: float = 0.9999999,
    enable_scale_and_shift: bool = False,
) -> Any:
    """Return (x - mean) * scale of statistics over all batches so far: mean = sum / size, scale = √(size / square sum).

    Shapes: input [n, c]. Parameters that no optimizer trains, [c]: `<name>.batch_size`, `.batch_sum` and
    `.batch_square_sum`, which start at the values of `batch_size`, `batch_sum` and `batch_square` in the dict
    `param_attr` (1e4, 0, 1e4). A batch adds 1, its mean and its mean square distance from the mean plus epsilon, after
    they have decayed by `summary_decay_rate`: the rule of Fluid's GPU kernel (on CPU Fluid gives them to an optimizer).
    `slot_dim`: a row's slot of that many columns whose first one is 0 gives zeros and does not count.
    `enable_scale_and_shift`: times `<name>.scale_w` plus `<name>.bias`, which are trained.
    Raises ProgramError for `sync_stats`: statistics are over the rows of a replica, as those of batch_norm.
    """
    expect_features("data_norm", input, 1)
    width = input.desc.shape[-1]
    if input.ndim != 2 or not isinstance(width, int) or data_layout not in ("NCHW", "NHWC"):
        raise ProgramError(
            f"{user_line()}: data_norm(data_layout={data_layout!r}) needs an input [n, c]; got {input!r}"
        )
    if sync_stats:
        raise ProgramError(
            f"{user_line()}: data_norm(sync_stats=True): statistics are over the rows of a replica; leave it out"
        )
    if slot_dim > 0 and width % slot_dim:
        raise ProgramError(f"{user_line()}: data_norm: {width} columns do not divide into slots of {slot_dim}")
    start: Mapping[str, float] = param_attr if isinstance(param_attr, dict) else {}
    prefix = name or "dn"

    def parameter(suffix: str, value: float, *, trainable: bool) -> Any:
        attr = ParamAttr(f"{prefix}.{suffix}", Constant(value), trainable=trainable)
        return create_parameter([width], input.desc.dtype, attr, prefix=prefix, suffix=suffix)

    with name_scope(default_main_program().unique("data_norm")):
        kept = [parameter(n, start.get(key, value), trainable=False) for n, (key, value) in _STATISTICS.items()]
        size, total, square = kept
        with torch.no_grad():
            means, scales = total / size, torch.sqrt(size / square)
        _record_update(kept, input, means, (epsilon, summary_decay_rate, slot_dim))
        normal = (input - means) * scales
        if enable_scale_and_shift:
            weight, bias = parameter("scale_w", start.get("scale_w", 1.0), trainable=True), start.get("bias", 0.0)
            normal = normal * weight + parameter("bias", bias, trainable=True)
        if slot_dim > 0:
            normal = _without_hidden(normal, input, slot_dim, is_trained=enable_scale_and_shift)
        return activate(normal, act)


def _record_update(kept: list[Any], input: Any, means: Any, numbers: tuple[float, float, int]) -> None:
    recording = recording_of(default_main_program())
    with torch.no_grad(), recording_modes(recording):
        operands = (*(one.fake for one in kept), input.fake.detach(), means.fake)
        torch.ops.penstock.data_norm_update_(*operands, *numbers, True)


def _without_hidden(normal: Any, input: Any, slot_dim: int, *, is_trained: bool) -> Any:
    """Zeros for slots that are not shown. As in Fluid, gradients go through them unless scale and shift are trained."""
    with torch.no_grad():
        first = input.abs().unflatten(1, (-1, slot_dim))[:, :, :1] >= 1e-7
        counts = first.expand(-1, -1, slot_dim).flatten(1)
    hidden = torch.where(counts, normal, torch.zeros_like(normal))
    return hidden if is_trained else normal + (hidden - normal).detach()


def continuous_value_model(input: Any, cvm: Any, use_cvm: bool = True) -> Any:
    """Return `input` with log(x + 1) of impressions and of clicks less that of impressions in its first two columns.

    Shapes: input [n, c], or ragged rows [rows, c]; cvm [n, 2], impressions and clicks of each sample; result [n, c], or
    [n, c - 2] without the two if not `use_cvm`. The gradient of the two columns is `cvm`, as in Fluid.
    """
    expect_features("continuous_value_model", input, 1)
    with name_scope(default_main_program().unique("cvm")):
        counts = cvm
        if is_sequence(input) and not is_sequence(cvm):
            with torch.no_grad():
                counts = sequence_expand_as(cvm, input)
        return record_call(torch.ops.penstock.cvm, (input, counts.detach(), bool(use_cvm)), {})


__all__ = ["continuous_value_model", "data_norm"]
