"""Detections compared with the boxes that are there: which are right, and the mean average precision of them.

Source: paddle/fluid/operators/detection_map_op.h (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

AVERAGES = ("integral", "11point")
_STEP = 1e-6  # recalls that are closer are one


def judged(
    found: Tensor, lengths: Tensor, given: Tensor, of_given: Tensor, settings: tuple[int, float, bool]
) -> tuple[Tensor, Tensor]:
    """Return (label, score, 1 or 0) of each detection that counts [k, 3], and how many boxes there are of each class.

    Shapes: found [rows, 6], of label, score and box, or [1, 1] where nothing was found; given [rows, 6], of label,
    difficult or not, and box, or [rows, 5] without the second; lengths of the images' sequences, int64; the counts
    int64 [classes]. `settings`: (classes, overlap, whether difficult boxes count). A detection is right if it overlaps
    a box of its class by more than that, and the one that it overlaps most belongs to none of a better score; where
    that box is difficult and does not count, the detection does not either. Raises ValueError for labels out of range
    and for unequal numbers of images.
    """
    num_classes, least, takes_all = settings
    boxes = _split(given, of_given)
    detections = _split(found, lengths) if found.shape[1] == 6 else [np.zeros((0, 6), np.float32)] * len(boxes)
    if len(detections) != len(boxes):
        raise ValueError(f"there are detections of {len(detections)} images and boxes of {len(boxes)}")
    counts, rows = np.zeros(num_classes, np.int64), list[tuple[float, float, int]]()
    for own, there in zip(detections, boxes, strict=True):
        labels, is_difficult = there[:, 0].astype(np.int64), _difficult(there)
        if labels.size and not 0 <= labels.min() <= labels.max() < num_classes:
            raise ValueError(f"boxes have labels {labels.min()} to {labels.max()}, and there are {num_classes} classes")
        np.add.at(counts, labels[~is_difficult | takes_all], 1)
        for label in np.unique(own[:, 0].astype(np.int64)):
            of_label, same = own[own[:, 0].astype(np.int64) == label], labels == label
            for score, is_right in _of_class(of_label, there[same, -4:], is_difficult[same] & (not takes_all), least):
                rows.append((label, score, is_right))
    return torch.tensor(rows, dtype=found.dtype).reshape(-1, 3), torch.from_numpy(counts)


def averaged(rows: Tensor, counts: Tensor, kind: str) -> tuple[Tensor]:
    """Return the mean over the classes that have boxes of their average precision, float32 [1]; 0 without any.

    Shapes: rows [k, 3] and counts [classes] of `judged`. `kind`: 'integral', the sum of precisions by the recall that
    they add, or '11point', the mean of the best precisions at recalls of 0, 0.1, …, 1.
    """
    average, table = _integral if kind == "integral" else _of_11_points, rows.numpy()
    total, number = table.dtype.type(0), 0
    for label, count in enumerate(counts.tolist()):
        if count:
            own = table[table[:, 0] == label]
            right = own[np.argsort(-own[:, 1], kind="stable"), 2].cumsum()
            places = np.arange(1, len(right) + 1, dtype=table.dtype)
            total, number = total + average(right / places, right / table.dtype.type(count)), number + 1
    return (torch.tensor([float(total) / max(number, 1)], dtype=torch.float32),)


def _split(rows: Tensor, lengths: Tensor) -> list[np.ndarray]:
    return np.split(rows.detach().numpy(), np.cumsum(lengths.reshape(-1).numpy())[:-1])


def _difficult(boxes: np.ndarray) -> np.ndarray:
    return np.abs(boxes[:, 1]) >= _STEP if boxes.shape[1] == 6 else np.zeros(len(boxes), bool)


def _of_class(
    found: np.ndarray, boxes: np.ndarray, is_left_out: np.ndarray, least: float
) -> Iterator[tuple[float, int]]:
    """(score, 1 or 0) of the detections of one class in one image, the best score first."""
    taken: set[int] = set()
    for row in found[np.argsort(-found[:, 1], kind="stable")] if len(boxes) else found:
        overlaps = _overlaps(np.clip(row[2:], 0, 1), boxes) if len(boxes) else np.zeros(1, row.dtype)
        best = int(overlaps.argmax())
        if not overlaps[best] > np.float32(least):
            yield row[1], 0
        elif not is_left_out[best]:
            yield row[1], int(best not in taken)
            taken.add(best)


def _overlaps(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """What a box shares with each of others, of what they cover together; boxes that touch overlap by 0."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = (high - low).clip(0).prod(1)
    own, areas = (box[2:] - box[:2]).prod(), (others[:, 2:] - others[:, :2]).prod(1)
    found: np.ndarray = np.divide(shared, own + areas - shared, out=np.zeros_like(shared), where=shared > 0)
    return found


def _integral(precision: np.ndarray, recall: np.ndarray) -> float:
    more = np.diff(recall, prepend=recall.dtype.type(0))
    return float((precision * more)[more > _STEP].sum())


def _of_11_points(precision: np.ndarray, recall: np.ndarray) -> float:
    exact = recall.astype(np.float64)  # Fluid compares with 0.7, not with its float32
    return sum(float(max(precision[exact >= point / 10], default=0.0)) for point in range(11)) / 11


__all__ = ["AVERAGES", "averaged", "judged"]
