"""The loss of a YOLO v3 head.

Source: yolov3_loss_op.h (Fluid 1.8). Of several boxes that one place is to find, all count in the loss, and the last
one alone has a gradient, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.boxes import places_of
from penstock.program.layers.expected import expect_known, expect_rank
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line

_LEAST_SIDE = 1e-6  # a box of a smaller side is none
_LEAST_SCORE = 1e-5
_MOST_SMOOTHING = 1 / 40


def yolov3_loss(
    x: Any,
    gt_box: Any,
    gt_label: Any,
    anchors: Sequence[int],
    anchor_mask: Sequence[int],
    class_num: int,
    ignore_thresh: float,
    downsample_ratio: int,
    gt_score: Any = None,
    use_label_smooth: bool = True,
    name: str | None = None,
) -> Any:
    """Return the loss of each image, [n].

    Shapes: x [n, a (5 + classes), h, w], of a anchors: two numbers of the center, two of the sides, whether there is a
    box, classes. gt_box [n, b, 4]: center, width and height in shares of the image; one without sides is none. gt_label
    int32 [n, b]. gt_score [n, b]: how much each counts; 1 without it. `anchors`: width and height of each in pixels, of
    all heads; `anchor_mask`: which are this head's. A predicted box that overlaps with one by more than `ignore_thresh`
    need not be a background. Raises ProgramError for other channels.
    """
    count, rows, columns = len(anchor_mask), expect_known("yolov3_loss", x, 2), expect_known("yolov3_loss", x, 3)
    expect_rank("yolov3_loss", gt_box, 3)
    if len(anchors) % 2 or not set(anchor_mask) <= set(range(len(anchors) // 2)) or not count:
        raise ProgramError(
            f"{user_line()}: yolov3_loss: anchor_mask is {list(anchor_mask)}; expected some of the "
            f"{len(anchors) // 2} anchors, of two numbers each"
        )
    if x.desc.shape[1] != count * (5 + class_num):
        raise ProgramError(
            f"{user_line()}: yolov3_loss: {x!r} has not the {count * (5 + class_num)} channels of {count} anchors and "
            f"{class_num} classes",
            variable=x.name,
        )
    with name_scope(name or default_main_program().unique("yolov3_loss")):
        head = x.reshape([-1, count, 5 + class_num, rows * columns]).transpose(2, 3)  # [n, a, places, 5 + classes]
        with torch.no_grad():
            boxes = _Boxes(gt_box.detach().to(x.dtype), anchors, anchor_mask, (rows, columns), downsample_ratio * rows)
            score = boxes.is_there if gt_score is None else gt_score.detach().to(x.dtype)
            overlaps = _overlaps(boxes.predicted(head.detach()), boxes.given) * boxes.is_there.unsqueeze(1)
            scores_of_places = boxes.scores(score, overlaps.amax(2) > ignore_thresh)
        found = head.flatten(1, 2)
        own = torch.gather(found, 1, boxes.place.unsqueeze(-1).expand([-1, -1, 5 + class_num]))
        weight = boxes.is_matched * score
        sides = (2.0 - boxes.given[..., 2:].prod(-1)) * weight
        centers = _entropy(own[..., :2], boxes.center).sum(-1)
        away = (own[..., 2:4] - boxes.sides).abs().sum(-1)
        labels = _entropy(own[..., 5:], _targets(gt_label, class_num, x, smooth=use_label_smooth)).sum(-1)
        of_boxes = (centers + away) * sides + labels * weight
        of_boxes = torch.where(boxes.is_last, of_boxes, of_boxes.detach()).sum(1)
        is_box = scores_of_places > _LEAST_SCORE
        counts = torch.where(is_box, scores_of_places, (scores_of_places > -0.5).to(x.dtype))
        return of_boxes + (_entropy(found[..., 4], is_box.to(x.dtype)) * counts).sum(1)


class _Boxes:
    """Boxes of the images, and the places of the head that are to find them.

    `given` [n, b, 4], with sides of 1 for none; `is_there`, `is_matched` [n, b]: 1 or 0; `place` [n, b]: among all of
    the head's; `center`, `sides` [n, b, 2]: what the head should say there; `is_last` bool [n, b]: of its place.
    """

    def __init__(
        self, boxes: Any, anchors: Sequence[int], mask: Sequence[int], grid: tuple[int, int], image: int
    ) -> None:
        self._grid, self._image = grid, image
        rows, columns = grid
        is_there = (boxes[..., 2:] >= _LEAST_SIDE).all(-1)
        self.is_there = is_there.to(boxes.dtype)
        self.given = torch.where(is_there.unsqueeze(-1), boxes, boxes.new_ones([]))
        every = torch.stack([boxes.new_full((), float(v)) for v in anchors]).reshape([-1, 2])
        self._own = every[list(mask)]
        nearest = _same_center(self.given[..., 2:], every / image).argmax(-1)
        matches = torch.stack([nearest == one for one in mask], -1)
        self.is_matched = torch.logical_and(matches.any(-1), is_there).to(boxes.dtype)
        cells = self.given[..., :2] * torch.stack([boxes.new_full((), float(v)) for v in (columns, rows)])
        at = cells.floor().to(torch.int64)
        column, row = at[..., 0].clamp(0, columns - 1), at[..., 1].clamp(0, rows - 1)
        which = matches.to(torch.int64).argmax(-1)
        self.place = (which * rows + row) * columns + column
        self.center = self.given[..., :2] * rows - torch.stack([column, row], -1)
        self.sides = (self.given[..., 2:] * image / every[nearest]).log()
        self._order = self.is_matched.cumsum(1).to(torch.int64) * self.is_matched.to(torch.int64)
        none = self._order.new_zeros([boxes.shape[0], len(mask) * rows * columns])
        self._last = none.scatter_reduce(1, self.place, self._order, "amax")
        self.is_last = torch.gather(self._last, 1, self.place) == self._order

    def predicted(self, head: Any) -> Any:
        """The boxes that the head predicts, [n, a places, 4]."""
        rows, columns = self._grid
        place = torch.stack(places_of(head, rows, columns), -1).reshape([1, 1, rows * columns, 2])
        middle = (head[..., :2].sigmoid() + place) / rows
        sides = head[..., 2:4].exp() * self._own.reshape([1, -1, 1, 2]) / self._image
        return torch.cat([middle, sides], -1).flatten(1, 2)

    def scores(self, score: Any, is_ignored: Any) -> Any:
        """Of each place the score of the last box that it is to find; else -1 if it is ignored, and 0. [n, a places]"""
        is_last = self.is_matched * self.is_last.to(score.dtype)
        at = torch.zeros_like(self._last, dtype=score.dtype).scatter_add(1, self.place, score * is_last)
        return torch.where(self._last > 0, at, -is_ignored.to(score.dtype))


def _same_center(left: Any, right: Any) -> Any:
    """The overlap of boxes with one center, by their sides: of [.., 2] and [m, 2], [.., m]."""
    left = left.unsqueeze(-2)
    shared = torch.minimum(left, right).prod(-1)
    return shared / (left.prod(-1) + right.prod(-1) - shared)


def _overlaps(left: Any, right: Any) -> Any:
    """Intersection over union of boxes as centers and sides: of [n, p, 4] and [n, b, 4], [n, p, b]."""
    left, right = left.unsqueeze(2), right.unsqueeze(1)
    low = torch.maximum(left[..., :2] - left[..., 2:] / 2, right[..., :2] - right[..., 2:] / 2)
    high = torch.minimum(left[..., :2] + left[..., 2:] / 2, right[..., :2] + right[..., 2:] / 2)
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / (left[..., 2:].prod(-1) + right[..., 2:].prod(-1) - shared)


def _entropy(x: Any, target: Any) -> Any:
    """Cross entropy of sigmoid(x)."""
    return x.clamp(min=0) - x * target + (-x.abs()).exp().log1p()


def _targets(label: Any, classes: int, like: Any, *, smooth: bool) -> Any:
    """What each class should be, [n, b, classes]."""
    numbers = label.new_ones([classes]).cumsum(0) - 1
    away = min(1 / classes, _MOST_SMOOTHING) if smooth else 0.0
    is_class = (label.unsqueeze(-1) == numbers).to(like.dtype)
    return is_class * (1.0 - 2 * away) + away
