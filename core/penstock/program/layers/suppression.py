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
    that is kept, down to 0.5. Without detections in any image there is one row [1, 1] of -1. Raises ProgramError for
    polygons and for boxes of each class.
    """
    settings = (score_threshold, nms_top_k, keep_top_k, nms_threshold, normalized, nms_eta, background_label)
    return _kept(bboxes, scores, settings, name, marks_none=True)[0]


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
    """Return what `multiclass_nms` does, without detections no rows, [0, 6].

    With `return_index` also the numbers of the boxes, int32 [k, 1], counted through all images.
    """
    settings = (score_threshold, nms_top_k, keep_top_k, nms_threshold, normalized, nms_eta, background_label)
    found, index = _kept(bboxes, scores, settings, name, marks_none=False)
    return (found, index) if return_index else found


def _kept(bboxes: Any, scores: Any, settings: Any, name: str | None, *, marks_none: bool) -> tuple[Any, Any]:
    """(detections, numbers of the boxes). With `marks_none`, width and number of sequences follow from data, too."""
    expect_rank("multiclass_nms", scores, 3)
    expect_rank("multiclass_nms", bboxes, 3)
    if expect_known("multiclass_nms", bboxes, 2) != 4:
        raise ProgramError(
            f"{user_line()}: multiclass_nms needs boxes of four numbers; got {bboxes!r}. There are no polygons here",
            variable=bboxes.name,
        )
    least_score, num_candidates, num_kept, overlap, is_normalized, eta, background = settings
    plain = (
        int(background), float(least_score), int(num_candidates), int(num_kept), float(overlap), float(eta),
        bool(is_normalized), marks_none,
    )  # fmt: skip
    recording = recording_of(default_main_program())

    def build() -> Any:
        of_data = recording.symbols.new_of_data
        size, width, images = of_data(), of_data() if marks_none else 6, of_data() if marks_none else scores.shape[0]
        numbers = of_data() if marks_none else size
        kinds = [([size, width], bboxes.dtype), ([numbers, 1], torch.int32), ([images, 1], torch.int64)]
        fakes = [empty_fake(sizes, None, kind) for sizes, kind in kinds]
        append(recording, "rows_kept", (bboxes.detach(), scores.detach(), plain), fakes)
        rows, index, counts = (recording.handle(fake) for fake in fakes)
        return give_levels(recording, rows.clone(), [counts.clone()]), index

    with name_scope(name or default_main_program().unique("multiclass_nms")):
        return sized_in_block(recording, build)  # type: ignore[no-any-return]  # the pair that build returns


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

    See `multiclass_nms`, with `return_index` `multiclass_nms2`. The background is class 0 and the threshold does not
    fall, whatever is given, as in Fluid.
    """
    boxes = box_coder(prior_box, prior_box_var, loc, "decode_center_size")
    shares = softmax(scores.detach()).transpose(1, 2)
    settings = (score_threshold, nms_top_k, keep_top_k, nms_threshold)
    if return_index:
        return multiclass_nms2(boxes, shares, *settings, return_index=True)
    return multiclass_nms(boxes, shares, *settings)
