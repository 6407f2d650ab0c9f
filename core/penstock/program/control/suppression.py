"""Non-maximum suppression: of boxes that overlap, the one with the best score is kept.

Source: paddle/fluid/operators/detection/multiclass_nms_op.cc and nms_util.h (Fluid 1.8).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 0.5  # adaptive thresholds do not fall any more from here on


@dataclass(frozen=True, slots=True)
class _Settings:
    """Which boxes are candidates, and how many are kept; a number of -1: all."""

    background: int
    least_score: float
    num_candidates: int
    num_kept: int
    overlap: float
    eta: float
    is_normalized: bool
    marks_none: bool


def kept(
    boxes: Tensor, scores: Tensor, settings: tuple[int, float, int, int, float, float, bool, bool]
) -> tuple[Tensor, ...]:
    """Return (label, score, box) of what is kept [k, 6], its number among all boxes int32 [k, 1], and of each image how
    many there are, int64 [n, 1].

    Shapes: boxes [n, m, 4], scores [n, classes, m]. Rows are in the order of images, classes, scores. If nothing is
    kept of any image, and that is to be marked, there is one row [1, 1] of -1, as if of a single image.
    """
    chosen, own = _Settings(*settings), boxes.detach().numpy()
    rows: list[np.ndarray] = []
    numbers: list[int] = []
    counts: list[int] = []
    for number, (image, by_class) in enumerate(zip(own, scores.detach().numpy(), strict=True)):
        found = _of_image(image, by_class, chosen)
        rows += [np.array([label, by_class[label, at], *image[at]], own.dtype) for label, at in found]
        numbers += [number * own.shape[1] + at for _, at in found]
        counts.append(len(found))
    if not rows and chosen.marks_none:
        no_index = torch.zeros((0, 1), dtype=torch.int32)
        return torch.full((1, 1), -1.0, dtype=boxes.dtype), no_index, torch.ones((1, 1), dtype=torch.int64)
    whole = np.stack(rows) if rows else np.zeros((0, 2 + own.shape[2]), own.dtype)
    index = np.array(numbers, np.int32).reshape(-1, 1)
    return torch.from_numpy(whole), torch.from_numpy(index), torch.tensor(counts, dtype=torch.int64).reshape(-1, 1)


def _of_image(boxes: np.ndarray, scores: np.ndarray, chosen: _Settings) -> list[tuple[int, int]]:
    """(label, box) of what is kept of an image, by label."""
    labels = [label for label in range(len(scores)) if label != chosen.background]
    found = [(label, at) for label in labels for at in _of_class(boxes, scores[label], chosen)]
    if 0 <= chosen.num_kept < len(found):
        found.sort(key=lambda one: -scores[one])
        found = sorted(found[: chosen.num_kept], key=lambda one: one[0])
    return found


def _of_class(boxes: np.ndarray, scores: np.ndarray, chosen: _Settings) -> list[int]:
    order = [int(at) for at in np.argsort(-scores, kind="stable") if scores[at] > chosen.least_score]
    found: list[int] = []
    most = chosen.overlap
    for at in order if chosen.num_candidates < 0 else order[: chosen.num_candidates]:
        if found and not (_overlaps(boxes[at], boxes[found], chosen.is_normalized) <= most).all():
            continue
        found.append(at)
        if chosen.eta < 1 and most > _SMALLEST:
            most *= chosen.eta
    return found


def _overlaps(box: np.ndarray, others: np.ndarray, is_normalized: bool) -> np.ndarray:
    """The intersection over union with each; 0 of boxes that do not meet. In pixels edges belong to a box."""
    one = 0.0 if is_normalized else 1.0
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = (sides + one).prod(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = shared / (_area(box[None], one) + _area(others, one) - shared)
    return np.where((sides < 0).any(1), 0.0, share)


def _area(boxes: np.ndarray, one: float) -> np.ndarray:
    sides = boxes[:, 2:] - boxes[:, :2]
    return np.where((sides < 0).any(1), 0.0, (sides + one).prod(1))
