"""Regions of images: what a detector sees of each box, in a fixed number of parts.

Source: fluid.layers.roi_align, roi_pool (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.expected import expect_rank
from penstock.program.layers.sequences import is_sequence, sequence_lengths
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized
from penstock.program.record.variable import record_call


@reads_unsized
def roi_align(
    input: Any,
    rois: Any,
    pooled_height: int = 1,
    pooled_width: int = 1,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    name: str | None = None,
    rois_lod: Any = None,
) -> Any:
    """Return the means of the parts of each box, between whose places values are interpolated.

    Shapes: input [n, c, h, w]; rois ragged [rows, 4], of each image a sequence: left, top, right, bottom, times
    `spatial_scale` places of the input; result [rows, c, pooled_height, pooled_width]. `sampling_ratio`: how many
    places of a part are looked at in each direction; as many as it has if that is not positive. Raises ProgramError for
    boxes without sequences.
    """
    images = _images_of("roi_align", input, rois, rois_lod)
    with name_scope(name or default_main_program().unique("roi_align")):
        parts, scale = [int(pooled_height), int(pooled_width)], float(spatial_scale)
        operands = (input, rois.detach(), images, parts, scale, int(sampling_ratio))
        return record_call(torch.ops.penstock.roi_align, operands, {})


@reads_unsized
def roi_pool(
    input: Any,
    rois: Any,
    pooled_height: int = 1,
    pooled_width: int = 1,
    spatial_scale: float = 1.0,
    rois_lod: Any = None,
) -> Any:
    """Return the largest value of each part of each box, whose bounds are rounded; 0 for a part beyond the image.

    Shapes: see `roi_align`. Raises ProgramError for boxes without sequences.
    """
    images = _images_of("roi_pool", input, rois, rois_lod)
    with name_scope(default_main_program().unique("roi_pool")):
        parts = [int(pooled_height), int(pooled_width)]
        return record_call(
            torch.ops.penstock.roi_pool, (input, rois.detach(), images, parts, float(spatial_scale)), {}
        )[0]


def _images_of(layer: str, input: Any, rois: Any, rois_lod: Any) -> Any:
    """The image of each box, int64 [rows]."""
    expect_rank(layer, input, 4)
    expect_rank(layer, rois, 2)
    if rois_lod is not None or not is_sequence(rois):
        raise ProgramError(
            f"{user_line()}: {layer} needs the boxes of each image as a sequence, and no rois_lod; {rois!r} has "
            f"{'one' if is_sequence(rois) else 'none'}. Declare the input with lod_level=1, or use layers.lod_reset",
            variable=rois.name,
        )
    with name_scope(layer):
        return record_call(torch.ops.penstock.sequence_rows, (sequence_lengths(rois), rois.shape[0], "sequence"), {})
