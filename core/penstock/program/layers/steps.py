"""Layers over the steps of sequences: ragged rows, or a padded batch [n, t, d]; images as sequences of windows.

Source: python/paddle/fluid/layers/nn.py, row_conv_op.cc, add_position_encoding_op.h, im2sequence_op.h (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.activations import activate
from penstock.program.layers.expected import expect_known, expect_rank, refuse
from penstock.program.layers.sequences import is_sequence, padded, sequence_lengths, unpadded, with_lengths
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.variable import record_call
from penstock.program.training.parameters import ParamAttr, create_parameter


def row_conv(input: Any, future_context_size: int, param_attr: Any = None, act: str | None = None) -> Any:
    """Return for each step the sum of it and the next ones, each times a row of the filter, column by column.

    Shapes: input [rows, d], ragged, or [n, t, d]; filter w_0 [future_context_size + 1, d]. Beyond a sequence's end are
    zeros. Source: fluid.layers.row_conv.
    """
    if is_sequence(input):
        steps, _ = padded("row_conv", input)
        return unpadded(row_conv(steps, future_context_size, param_attr, act), input)
    expect_rank("row_conv", input, 3)
    prefix, wanted = default_main_program().unique("row_conv"), ParamAttr.of(param_attr)
    if wanted is None or future_context_size < 0:
        raise ProgramError(
            f"{user_line()}: {prefix}: future_context_size is {future_context_size}, param_attr {param_attr!r}; "
            "expected 0 or more, and not False"
        )
    width, dtype = expect_known("row_conv", input, 2), input.desc.dtype
    with name_scope(prefix):
        weight: Any = create_parameter([future_context_size + 1, width], dtype, wanted, prefix=prefix, suffix="w_0")
        seen, total = F.pad(input, [0, 0, 0, future_context_size]), input * weight[0]
        for ahead in range(1, future_context_size + 1):
            total = total + seen.narrow(1, ahead, input.shape[1]) * weight[ahead]
        return activate(total, act)


def add_position_encoding(input: Any, alpha: float, beta: float, name: str | None = None) -> Any:
    """Return alpha * input + beta * encoding of each step's position j in its sequence.

    Shapes: [rows, d], ragged, or [n, t, d], d even. The encoding is sin(j / 10000^(k / (d / 2 - 1))) for k below d / 2,
    then their cosines; of d = 2 sin and cos of j / 10000. Source: fluid.layers.add_position_encoding.
    """
    ragged = is_sequence(input)
    expect_rank("add_position_encoding", input, 2 if ragged else 3)
    width = expect_known("add_position_encoding", input, input.ndim - 1)
    if width % 2:
        refuse("add_position_encoding", "an even last size", input, "Pad or cut it")
    half = width // 2
    with name_scope(name or default_main_program().unique("add_position_encoding")):
        if ragged:
            operands = (sequence_lengths(input), input.shape[0], "position")
            at = record_call(torch.ops.penstock.sequence_rows, operands, {}).to(input.dtype)
        else:
            at = input.new_ones([input.shape[1]]).cumsum(0) - 1.0
        place = input.new_ones([half]).cumsum(0) - 1.0
        divisor = torch.exp(place * (math.log(10000.0) / (half - 1))) if half > 1 else place + 10000.0
        angle = at.unsqueeze(-1) / divisor
        return input * alpha + torch.cat([torch.sin(angle), torch.cos(angle)], -1) * beta


def im2sequence(
    input: Any,
    filter_size: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    input_image_size: Any = None,
    out_stride: int | Sequence[int] = 1,
    name: str | None = None,
) -> Any:
    """Return the windows of each image as a sequence, row by row.

    Shapes: input [n, c, h, w]; result [n windows, c kh kw], ragged. `padding`: one number, (h, w) or (top, left,
    bottom, right). Images of different sizes, `input_image_size`, are refused. Source: fluid.layers.im2sequence.
    """
    expect_rank("im2sequence", input, 4)
    around = [padding] * 4 if isinstance(padding, int) else list(padding) * (4 // max(len(padding), 1))
    if input_image_size is not None or len(around) != 4:
        raise ProgramError(
            f"{user_line()}: im2sequence: padding is {padding}, input_image_size {input_image_size!r}; expected one, "
            "two or four numbers, and None: how many windows there are does not follow from data"
        )
    top, left, bottom, right = around
    kernel, steps = ((v, v) if isinstance(v, int) else tuple(v) for v in (filter_size, stride))
    with name_scope(name or default_main_program().unique("im2sequence")):
        columns = F.unfold(F.pad(input, [left, right, top, bottom]), kernel, 1, 0, steps)
        rows = columns.transpose(1, 2).flatten(0, 1)
        lengths = input.new_full([input.shape[0], 1], columns.shape[2], dtype=torch.int64)
        return with_lengths(rows, lengths)
