"""Boxes of the ground truth matched with priors, and the loss of SSD that follows.

`bipartite_match` decides box by box, so it is an operator of blocks (program/control/matching.py); the rest is torch.
Source: fluid.layers.bipartite_match, target_assign, ssd_loss (Fluid 1.8); bipartite_match_op.cc, target_assign_op.h,
mine_hard_examples_op.cc.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.boxes import box_coder, iou_similarity
from penstock.program.layers.expected import expect_known, expect_rank
from penstock.program.layers.losses import smooth_l1, softmax_with_cross_entropy
from penstock.program.layers.sequences import is_sequence, sequence_lengths
from penstock.program.record.arrays import append
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import sized_in_block
from penstock.program.record.variable import record_call

_TYPES = ("bipartite", "per_prediction")


def bipartite_match(
    dist_matrix: Any, match_type: str | None = None, dist_threshold: float | None = None, name: str | None = None
) -> tuple[Any, Any]:
    """Return for each column the row that it is matched with, counted in its sequence, or -1, and their closeness or 0.

    Shapes: dist_matrix [rows, m], ragged or of one sample; int32 [n, m] and [n, m]. The closest pair of a row and a
    column without a match is matched, until one of them has none left or nothing is close (1e-6). 'per_prediction':
    columns that are left get the closest row if it is at least `dist_threshold` (0.5) close.
    """
    kind, least = match_type or "bipartite", 0.5 if dist_threshold is None else float(dist_threshold)
    if kind not in _TYPES:
        raise ProgramError(f"{user_line()}: bipartite_match: match_type is {kind!r}; expected one of {_TYPES}")
    expect_rank("bipartite_match", dist_matrix, 2)
    recording = recording_of(default_main_program())
    with name_scope(name or default_main_program().unique("bipartite_match")):
        whole = dist_matrix.detach()
        lengths = sequence_lengths(dist_matrix) if is_sequence(dist_matrix) else None

        def build() -> Any:
            own = whole.new_full([1, 1], whole.shape[0], dtype=torch.int64) if lengths is None else lengths
            sizes = [own.shape[0], whole.shape[1]]
            fakes = [empty_fake(sizes, None, torch.int32), empty_fake(sizes, None, whole.dtype)]
            append(recording, "rows_matched", (whole, own, kind, least), fakes)
            return tuple(recording.handle(fake) for fake in fakes)

        indices, closeness = sized_in_block(recording, build)
        return indices, closeness


def target_assign(
    input: Any,
    matched_indices: Any,
    negative_indices: Any = None,
    mismatch_value: float | None = None,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Return for each prediction the target that it is matched with, [n, m, k], and 1 where it counts, [n, m, 1].

    Shapes: input ragged [rows, p, k], of which prediction w takes column w % p; matched_indices int32 [n, m], with -1
    for none, which gives `mismatch_value` (0) and a weight of 0; negative_indices ragged int32 [negatives, 1]:
    predictions that count although they are not matched.
    """
    expect_rank("target_assign", input, 3)
    if not is_sequence(input):
        raise ProgramError(f"{user_line()}: target_assign needs targets with sequences; {input!r} has none")
    with name_scope(name or default_main_program().unique("target_assign")), torch.no_grad():
        negatives = None
        if negative_indices is not None:
            rows = record_call(
                torch.ops.penstock.sequence_rows,
                (sequence_lengths(negative_indices), negative_indices.shape[0], "sequence"), {},
            )  # fmt: skip
            places = (rows, negative_indices.reshape([-1]).to(torch.int64))
            counted = torch.zeros_like(matched_indices, dtype=torch.bool)
            negatives = torch.index_put(counted, places, rows.new_ones([]).to(torch.bool))
        return _assigned(input.detach(), sequence_lengths(input), matched_indices, negatives, mismatch_value or 0.0)


def _assigned(x: Any, lengths: Any, matched: Any, negatives: Any, filler: float) -> tuple[Any, Any]:
    width, count = expect_known("target_assign", x, 1), expect_known("target_assign", x, 2)
    starts, found = lengths.cumsum(0) - lengths, matched >= 0
    columns = torch.remainder(torch.ones_like(matched[:1], dtype=torch.int64).cumsum(1) - 1, width)
    at = (starts + matched.to(torch.int64).clamp(min=0)) * width + columns
    at = torch.where(found, at, torch.zeros_like(at))
    rows = x.reshape([-1, count])
    rows = torch.cat([rows, rows.new_zeros([1, count])])  # where no image has a box
    values = rows.index_select(0, at.reshape([-1])).reshape([*matched.shape, count])
    chosen = found if negatives is None else torch.logical_and(found, negatives.logical_not())
    counts = found if negatives is None else torch.logical_or(found, negatives)
    return torch.where(chosen.unsqueeze(2), values, torch.full_like(values, filler)), counts.unsqueeze(2).to(
        torch.float32
    )


def ssd_loss(
    location: Any,
    confidence: Any,
    gt_box: Any,
    gt_label: Any,
    prior_box: Any,
    prior_box_var: Any = None,
    background_label: int = 0,
    overlap_threshold: float = 0.5,
    neg_pos_ratio: float = 3.0,
    neg_overlap: float = 0.5,
    loc_loss_weight: float = 1.0,
    conf_loss_weight: float = 1.0,
    match_type: str = "per_prediction",
    mining_type: str = "max_negative",
    normalize: bool = True,
    sample_size: int | None = None,
) -> Any:
    """Return the loss of each image, [n, 1], of SSD's predictions [n, m, 4] and [n, m, classes].

    Shapes: gt_box ragged [rows, 4] and gt_label int [rows, 1], of each image a sequence; prior_box [m, 4]. Priors that
    overlap no box by `neg_overlap` are negative: of them the worst count, `neg_pos_ratio` times as many as are matched.
    With `normalize` it is divided by how many priors are matched, which has to be one at least.
    """
    if mining_type != "max_negative":
        raise ProgramError(
            f"{user_line()}: ssd_loss: mining_type is {mining_type!r}; expected 'max_negative', as in Fluid"
        )
    with name_scope(default_main_program().unique("ssd_loss")):
        count, classes = (expect_known("ssd_loss", confidence, axis) for axis in (1, 2))
        matched, closeness = bipartite_match(iou_similarity(gt_box, prior_box), match_type, overlap_threshold)
        with torch.no_grad():
            lengths, labels = sequence_lengths(gt_box), gt_label.detach().reshape([-1, 1, 1])
            assigned, _ = _assigned(labels, lengths, matched, None, background_label)
            hard = softmax_with_cross_entropy(confidence.detach().reshape([-1, classes]), _column(assigned))
            negatives = _negatives(hard.reshape([-1, count]), matched, closeness, neg_pos_ratio, neg_overlap)
            codes = box_coder(prior_box, prior_box_var, gt_box)
            boxes, box_weights = _assigned(codes, lengths, matched, None, background_label)
            assigned, weights = _assigned(labels, lengths, matched, negatives, background_label)
        entropy = softmax_with_cross_entropy(confidence.reshape([-1, classes]), _column(assigned))
        away = smooth_l1(location.reshape([-1, 4]), boxes.reshape([-1, 4]))
        entropy, away = (
            entropy * weights.reshape([-1, 1]).to(entropy.dtype),
            away * box_weights.reshape([-1, 1]).to(away.dtype),
        )
        loss = (entropy * conf_loss_weight + away * loc_loss_weight).reshape([-1, count]).sum(1, keepdim=True)
        return loss / box_weights.sum().to(loss.dtype) if normalize else loss


def _column(labels: Any) -> Any:
    return labels.reshape([-1, 1]).to(torch.int64)


def _negatives(loss: Any, matched: Any, closeness: Any, ratio: float, overlap: float) -> Any:
    """Which predictions count as negative: the worst of those that overlap little, `ratio` for each that is matched."""
    eligible = torch.logical_and(matched < 0, closeness < overlap)
    most = torch.floor((matched >= 0).sum(1, keepdim=True).to(loss.dtype) * ratio)
    worst = torch.argsort(torch.where(eligible, loss, torch.full_like(loss, float("-inf"))), 1, descending=True)
    return torch.logical_and(eligible, torch.argsort(worst, 1).to(loss.dtype) < most)
