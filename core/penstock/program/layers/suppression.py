"""Detections: boxes that are kept of all that a detector predicts. How many there are follows from data.

Source: fluid.layers.multiclass_nms, detection_output, fluid.contrib.layers.multiclass_nms2 (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.activations import softmax
from penstock.program.layers.boxes import box_coder
from penstock.program.layers.expected import expect_known, expect_rank
from penstock.program.layers.levels import give_levels
from penstock.program.record.arrays import append
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import sized_in_block


def multiclass_nms(
    bboxes: Any,
    scores: Any,
    score_threshold: float,
    nms_top_k: int,
    keep_top_k: int,
    nms_threshold: float = 0.3,
    normalized: bool = True,
    nms_eta: float = 1.0,
    background_label: int = 0,
    name: str | None = None,
) -> Any:
    """Return the detections of each image as a sequence of (label, score, left, top, right, bottom), [k, 6].

    Shapes: bboxes [n, m, 4], scores [n, classes, m]. Of each class but `background_label`, boxes of more than
    `score_threshold`, the best `nms_top_k` of them, are kept unless they overlap a better one by more than
    `nms_threshold`; of each image the best `keep_top_k`. -1: all. `nms_eta` below 1: the threshold falls with each box
    that is kept, down to 0.5. Raises ProgramError for polygons and for boxes of each class.
    """
    arguments = (score_threshold, nms_top_k, keep_top_k, nms_threshold, normalized, nms_eta, background_label)
    return multiclass_nms2(bboxes, scores, *arguments, name=name)


def multiclass_nms2(
    bboxes: Any,
    scores: Any,
    score_threshold: float,
    nms_top_k: int,
    keep_top_k: int,
    nms_threshold: float = 0.3,
    normalized: bool = True,
    nms_eta: float = 1.0,
    background_label: int = 0,
    return_index: bool = False,
    name: str | None = None,
) -> Any:
    """Return what `multiclass_nms` does; with `return_index` also the numbers of the boxes, int32 [k, 1], counted
    through all images."""
    expect_rank("multiclass_nms", scores, 3)
    expect_rank("multiclass_nms", bboxes, 3)
    if expect_known("multiclass_nms", bboxes, 2) != 4:
        raise ProgramError(
            f"{user_line()}: multiclass_nms needs boxes of four numbers; got {bboxes!r}. There are no polygons here",
            variable=bboxes.name,
        )
    settings = (
        int(background_label), float(score_threshold), int(nms_top_k), int(keep_top_k), float(nms_threshold),
        float(nms_eta), bool(normalized),
    )  # fmt: skip
    recording = recording_of(default_main_program())

    def build() -> Any:
        size = recording.symbols.new_of_data()
        kinds = [([size, 6], bboxes.dtype), ([size, 1], torch.int32), ([scores.shape[0], 1], torch.int64)]
        fakes = [empty_fake(sizes, None, kind) for sizes, kind in kinds]
        append(recording, "rows_kept", (bboxes.detach(), scores.detach(), settings), fakes)
        rows, index, counts = (recording.handle(fake) for fake in fakes)
        return give_levels(recording, rows.clone(), [counts.clone()]), index

    with name_scope(name or default_main_program().unique("multiclass_nms")):
        found, index = sized_in_block(recording, build)
        return (found, index) if return_index else found


def detection_output(
    loc: Any,
    scores: Any,
    prior_box: Any,
    prior_box_var: Any,
    background_label: int = 0,
    nms_threshold: float = 0.3,
    nms_top_k: int = 400,
    keep_top_k: int = 200,
    score_threshold: float = 0.01,
    nms_eta: float = 1.0,
    return_index: bool = False,
) -> Any:
    """Return the detections of SSD's predictions: codes [n, m, 4] of priors [m, 4] and scores [n, m, classes].

    See `multiclass_nms2`. The background is class 0 and the threshold does not fall, whatever is given, as in Fluid.
    """
    boxes = box_coder(prior_box, prior_box_var, loc, "decode_center_size")
    shares = softmax(scores.detach()).transpose(1, 2)
    return multiclass_nms2(
        boxes, shares, score_threshold, nms_top_k, keep_top_k, nms_threshold, return_index=return_index
    )
