"""Boxes in numbers: how they overlap, their codes relative to others, what a YOLO or focal head predicts.

Coordinates are left, top, right, bottom. Except `sigmoid_focal_loss`, no gradient goes through them, as in Fluid.
Source: the kernels of these operators in paddle/fluid/operators/detection (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.expected import expect_known, expect_rank
from penstock.program.layers.sequences import is_sequence, sequence_expand_as
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized
from penstock.program.record.variable import Variable

_LEAST = 1.1754943508222875e-38  # FLT_MIN


@reads_unsized
def iou_similarity(x: Any, y: Any, box_normalized: bool = True, name: str | None = None) -> Any:
    """Return the intersection over union of each box of x [n, 4] with each of y [m, 4]: [n, m].

    Without `box_normalized` coordinates are pixels: the right and lower edge belong to the box.
    """
    with name_scope(name or default_main_program().unique("iou_similarity")), torch.no_grad():
        one = 0.0 if box_normalized else 1.0
        left, right = x.detach().unsqueeze(1), y.detach().unsqueeze(0)
        sides = torch.minimum(left[..., 2:], right[..., 2:]) - torch.maximum(left[..., :2], right[..., :2]) + one
        shared = sides.clamp(min=0).prod(-1)
        return shared / (_area(left, one) + _area(right, one) - shared)


def _area(boxes: Any, one: float) -> Any:
    return (boxes[..., 2:] - boxes[..., :2] + one).prod(-1)


@reads_unsized
def box_coder(
    prior_box: Any,
    prior_box_var: Any,
    target_box: Any,
    code_type: str = "encode_center_size",
    box_normalized: bool = True,
    name: str | None = None,
    axis: int = 0,
) -> Any:
    """Return target boxes relative to priors [m, 4], or boxes from such codes.

    'encode_center_size': target [n, 4] to [n, m, 4]: distances of the centers in sides of the prior, and logarithms of
    the ratios of the sides. 'decode_center_size': target [n, m, 4] back; the priors are those of dimension 1, with
    `axis=1` those of dimension 0. `prior_box_var`: variances [m, 4], or four numbers; codes are divided by them.
    """
    if code_type not in ("encode_center_size", "decode_center_size") or axis not in (0, 1):
        raise ProgramError(
            f"{user_line()}: box_coder: code_type is {code_type!r} and axis {axis}; expected 'encode_center_size' or "
            "'decode_center_size', and 0 or 1"
        )
    encodes = code_type == "encode_center_size"
    expect_rank("box_coder", target_box, 2 if encodes else 3)
    at = 0 if encodes else axis
    with name_scope(name or default_main_program().unique("box_coder")), torch.no_grad():
        one, prior, target = 0.0 if box_normalized else 1.0, prior_box.detach(), target_box.detach()
        sides = prior[:, 2:] - prior[:, :2] + one
        centers, sides = (prior[:, :2] + sides / 2).unsqueeze(at), sides.unsqueeze(at)
        scale = _variance(prior_box_var, prior, at)
        if encodes:
            target = target.unsqueeze(1)
            own = target[..., 2:] - target[..., :2] + one
            away = ((target[..., 2:] + target[..., :2]) / 2 - centers) / sides
            return torch.cat([away, (own / sides).abs().log()], -1) / scale
        codes = target * scale
        middle, half = codes[..., :2] * sides + centers, codes[..., 2:].exp() * sides / 2
        return torch.cat([middle - half, middle + half - one], -1)


def _variance(given: Any, prior: Any, at: int) -> Any:
    if isinstance(given, Variable):
        return given.detach().unsqueeze(at)
    return 1.0 if given is None else torch.stack([prior.new_full((), float(v)) for v in given])


def box_clip(input: Any, im_info: Any, name: str | None = None) -> Any:
    """Return boxes within their image. Shapes: ragged [rows, 4 k], of each image a sequence; im_info [n, 3]: height,
    width and by how much the image was scaled."""
    if not is_sequence(input):
        raise ProgramError(
            f"{user_line()}: box_clip needs the boxes of each image as a sequence; {input!r} has none. Declare the "
            "input with lod_level=1",
            variable=input.name,
        )
    with name_scope(name or default_main_program().unique("box_clip")), torch.no_grad():
        shown = torch.floor(im_info.detach()[:, :2] / im_info.detach()[:, 2:] + 0.5) - 1
        most = sequence_expand_as(shown.flip(1), input).repeat(1, expect_known("box_clip", input, 1) // 2)
        return torch.minimum(input.detach(), most).clamp(min=0)


def yolo_box(
    x: Any,
    img_size: Any,
    anchors: Sequence[int],
    class_num: int,
    conf_thresh: float,
    downsample_ratio: int,
    clip_bbox: bool = True,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Return the boxes [n, anchors h w, 4] in pixels and scores [n, anchors h w, classes] of a YOLO v3 head.

    Shapes: x [n, anchors (5 + classes), h, w]; img_size int32 [n, 2]: height, width. `anchors`: width, height of each.
    Boxes of less than `conf_thresh` are zero, with their scores.
    """
    count, rows, columns = len(anchors) // 2, expect_known("yolo_box", x, 2), expect_known("yolo_box", x, 3)
    if len(anchors) % 2 or x.desc.shape[1] != count * (5 + class_num):
        raise ProgramError(
            f"{user_line()}: yolo_box: {x!r} has not the {count * (5 + class_num)} channels of {len(anchors)} numbers "
            f"of anchors, two for each, and {class_num} classes",
            variable=x.name,
        )
    with name_scope(name or default_main_program().unique("yolo_box")), torch.no_grad():
        head = x.detach().reshape([-1, count, 5 + class_num, rows, columns]).permute(0, 1, 3, 4, 2)
        place = torch.stack(places_of(x, rows, columns), -1)
        image = img_size.flip(1).to(x.dtype).reshape([-1, 1, 1, 1, 2])
        sides = torch.stack([x.new_full((), float(v)) for v in anchors]).reshape([1, count, 1, 1, 2])
        middle = (place + head[..., :2].sigmoid()) * image / rows
        half = head[..., 2:4].exp() * sides * image / (downsample_ratio * rows) / 2
        low, high = middle - half, middle + half
        if clip_bbox:
            low, high = low.clamp(min=0), torch.minimum(high, image - 1)
        sure = head[..., 4:5].sigmoid()
        keeps = (sure >= conf_thresh).to(x.dtype)
        boxes, scores = torch.cat([low, high], -1) * keeps, sure * head[..., 5:].sigmoid() * keeps
        return boxes.reshape([-1, count * rows * columns, 4]), scores.reshape([-1, count * rows * columns, class_num])


def places_of(like: Any, rows: int, columns: int) -> list[Any]:
    """The column and the row of each place, two of [rows, columns], of the dtype of `like`."""
    ones = like.new_ones([rows, columns])
    return [ones.cumsum(1) - 1, ones.cumsum(0) - 1]


def polygon_box_transform(input: Any, name: str | None = None) -> Any:
    """Return corners from distances: 4 times the column less the even channels, 4 times the row less the odd ones.

    Shapes: [n, c, h, w], of an even number of channels.
    """
    expect_rank("polygon_box_transform", input, 4)
    channels, rows, columns = (expect_known("polygon_box_transform", input, axis) for axis in (1, 2, 3))
    if channels % 2:
        raise ProgramError(
            f"{user_line()}: polygon_box_transform needs an even number of channels; got {input!r}", variable=input.name
        )
    with name_scope(name or default_main_program().unique("polygon_box_transform")), torch.no_grad():
        return torch.stack(places_of(input, rows, columns)).repeat(channels // 2, 1, 1) * 4.0 - input.detach()


def sigmoid_focal_loss(x: Any, label: Any, fg_num: Any, gamma: float = 2.0, alpha: float = 0.25) -> Any:
    """Return the focal loss of each class, [n, classes].

    Shapes: x [n, classes]; label int32 [n, 1]: 0 for the background, a class from 1 on, or -1 to leave the row out;
    fg_num int32 [1]: how many rows are no background, by which all is divided.
    """
    expect_rank("sigmoid_focal_loss", x, 2)
    with name_scope(default_main_program().unique("sigmoid_focal_loss")):
        classes = label.new_ones([expect_known("sigmoid_focal_loss", x, 1)]).cumsum(0)
        is_class = label.reshape([-1, 1]) == classes
        is_other = torch.logical_and(label.reshape([-1, 1]) != -1, is_class.logical_not())
        share = x.sigmoid()
        found = (1.0 - share) ** gamma * share.clamp(min=_LEAST).log() * alpha
        missed = share**gamma * F.logsigmoid(-x) * (1.0 - alpha)
        total = is_class.to(x.dtype) * found + is_other.to(x.dtype) * missed
        return -total / fg_num.reshape([]).clamp(min=1).to(x.dtype)
