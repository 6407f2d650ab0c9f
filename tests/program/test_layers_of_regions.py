"""`roi_align`, `roi_pool` and `yolov3_loss` against loops over Fluid's formulas in float64, with their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

L: Any = fluid.layers
IMAGES, BOXES_OF_IMAGES, PARTS, SCALE = (3, 3, 6, 8), [2, 0, 3], (2, 3), 0.5
BOXES = np.array(
    [
        [1.0, 2.0, 11.0, 9.0],
        [0.0, 0.0, 3.0, 3.0],
        [-6.0, -4.0, 7.5, 30.0],
        [4.2, 3.1, 4.3, 3.2],
        [13.0, 1.0, 15.5, 11.0],
    ]
)


def values() -> np.ndarray:
    return np.random.default_rng(5).normal(size=IMAGES)


def found(layer: Any, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a layer gives, and the gradient of the sum of its squares."""
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, *IMAGES[1:]], "float64")
        x.stop_gradient = False
        boxes = fluid.data("boxes", [None, 4], "float64", lod_level=1)
        out = layer(x, boxes, *PARTS, SCALE, **settings)
        fluid.append_backward(L.reduce_sum(out * out))
    assert fluid.Program.parse(str(main)) == main
    feed = {"x": values(), "boxes": fluid.create_lod_tensor(BOXES, [BOXES_OF_IMAGES])}
    one, grad = fluid.Executor().run(main, feed, [out, "x@GRAD"])
    return one, grad


def wanted(of_box: Any) -> tuple[np.ndarray, np.ndarray]:
    x = torch.tensor(values(), requires_grad=True)
    images = np.repeat(np.arange(len(BOXES_OF_IMAGES)), BOXES_OF_IMAGES)
    out = torch.stack([of_box(x[i], box) for i, box in zip(images.tolist(), (BOXES * SCALE).tolist(), strict=True)])
    (out * out).sum().backward()  # type: ignore[no-untyped-call]  # torch
    assert x.grad is not None
    return out.detach().numpy(), x.grad.numpy()


def interpolated(x: torch.Tensor, row: float, column: float) -> torch.Tensor:
    _, height, width = x.shape
    if row < -1 or row > height or column < -1 or column > width:
        return x[:, 0, 0] * 0.0
    row, column = min(max(row, 0.0), height - 1.0), min(max(column, 0.0), width - 1.0)
    top, left = int(row), int(column)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, over = row - top, column - left
    above = x[:, top, left] * (1 - over) + x[:, top, right] * over
    below = x[:, bottom, left] * (1 - over) + x[:, bottom, right] * over
    return above * (1 - down) + below * down


@pytest.mark.parametrize("samples", [2, -1])
def test_a_region_is_the_means_of_its_parts(samples: int) -> None:
    def of_box(x: torch.Tensor, box: list[float]) -> torch.Tensor:
        left, top, right, bottom = box
        high, wide = max(bottom - top, 1.0) / PARTS[0], max(right - left, 1.0) / PARTS[1]
        rows, columns = (samples, samples) if samples > 0 else (math.ceil(high), math.ceil(wide))
        parts = [
            sum(
                interpolated(x, top + (p + (i + 0.5) / rows) * high, left + (q + (j + 0.5) / columns) * wide)
                for i in range(rows)
                for j in range(columns)
            )
            / (rows * columns)
            for p in range(PARTS[0])
            for q in range(PARTS[1])
        ]
        return torch.stack(parts, 1).reshape(-1, *PARTS)  # type: ignore[arg-type]  # sums of tensors

    for one, other in zip(found(L.roi_align, sampling_ratio=samples), wanted(of_box), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_region_is_the_largest_values_of_its_parts() -> None:
    def of_box(x: torch.Tensor, box: list[float]) -> torch.Tensor:
        left, top, right, bottom = (math.floor(abs(v) + 0.5) * (1 if v >= 0 else -1) for v in box)
        high, wide = max(bottom - top + 1, 1) / PARTS[0], max(right - left + 1, 1) / PARTS[1]
        parts = []
        for p in range(PARTS[0]):
            for q in range(PARTS[1]):
                rows = [max(math.floor(p * high) + top, 0), min(math.ceil((p + 1) * high) + top, x.shape[1])]
                columns = [max(math.floor(q * wide) + left, 0), min(math.ceil((q + 1) * wide) + left, x.shape[2])]
                part = x[:, rows[0] : max(rows), columns[0] : max(columns)].flatten(1)
                parts.append(part.amax(1) if part.shape[1] else x[:, 0, 0] * 0.0)
        return torch.stack(parts, 1).reshape(-1, *PARTS)

    for one, other in zip(found(L.roi_pool), wanted(of_box), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", [L.roi_align, L.roi_pool])
def test_boxes_without_images_are_refused(layer: Any) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, *IMAGES[1:]], "float64")
        with pytest.raises(ProgramError, match="boxes of each image as a sequence"):
            layer(x, fluid.data("boxes", [None, 4], "float64"), 2, 2)


# ---------------------------------------------------------------- YOLO

ANCHORS, MASK, CLASSES, RATIO, GRID = [10, 13, 33, 23, 30, 61, 62, 45], [1, 3], 3, 8, (4, 4)
GIVEN = np.array(
    [
        [[0.3, 0.4, 0.9, 0.7], [0.5, 0.5, 0.0, 0.2], [0.31, 0.42, 0.9, 0.65]],  # none; two at one place
        [[0.9, 0.1, 0.3, 0.4], [0.6, 0.7, 1.0, 0.6], [0.2, 0.8, 0.95, 0.7]],
    ]
)
LABELS = np.array([[0, 1, 2], [2, 0, 1]], np.int32)
SCORES = np.array([[0.7, 0.4, 0.9], [1.0, 0.3, 0.0]])


def entropy(x: torch.Tensor, target: float) -> torch.Tensor:
    return torch.clamp(x, min=0) - x * target + torch.log1p(torch.exp(-x.abs()))


def overlap(a: Any, b: Any) -> float:
    sides = [
        min(a[k] + a[k + 2] / 2, b[k] + b[k + 2] / 2) - max(a[k] - a[k + 2] / 2, b[k] - b[k + 2] / 2) for k in (0, 1)
    ]
    shared = 0.0 if min(sides) < 0 else sides[0] * sides[1]
    return float(shared / (a[2] * a[3] + b[2] * b[3] - shared))


SIZE = RATIO * GRID[0]
SIDES = [ANCHORS[2 * k : 2 * k + 2] for k in range(len(ANCHORS) // 2)]
PLACES = [(a, row, column) for a in range(len(MASK)) for row in range(GRID[0]) for column in range(GRID[1])]


def best_overlap(x: torch.Tensor, place: tuple[int, int, int], image: int) -> float:
    a, row, column = place
    tx, ty, tw, th = x[a, :4, row, column].tolist()
    middle = [(at + 1 / (1 + math.exp(-t))) / GRID[0] for at, t in ((column, tx), (row, ty))]
    box = [*middle, math.exp(tw) * SIDES[MASK[a]][0] / SIZE, math.exp(th) * SIDES[MASK[a]][1] / SIZE]
    return max([0.0] + [overlap(box, g) for g in GIVEN[image] if min(g[2:]) >= 1e-6])


def loss_of_box(own: torch.Tensor, g: Any, label: int, score: float, smooth: bool) -> torch.Tensor:
    """own [5 + classes]: what is said at the box's place."""
    (rows, columns), scale = GRID, (2.0 - g[2] * g[3]) * score
    away = min(1 / CLASSES, 1 / 40) if smooth else 0.0
    found = sum(entropy(own[k], g[k] * rows - int(g[k] * (columns, rows)[k])) for k in (0, 1)) * scale
    for k in (0, 1):
        found = found + (own[2 + k] - math.log(g[2 + k] * SIZE / SIDES[nearest_anchor(g)][k])).abs() * scale
    for c in range(CLASSES):
        found = found + entropy(own[5 + c], 1 - away if c == label else away) * score
    return torch.as_tensor(found)


def nearest_anchor(g: Any) -> int:
    return int(np.argmax([overlap([0, 0, w / SIZE, h / SIZE], [0, 0, *g[2:]]) for w, h in SIDES]))


def loss_of_image(x: torch.Tensor, image: int, ignore: float, scores: np.ndarray, smooth: bool) -> torch.Tensor:
    """x [a, 5 + classes, h, w]."""
    objects = {place: -1.0 if best_overlap(x, place, image) > ignore else 0.0 for place in PLACES}
    total, found = x.sum() * 0.0, dict[tuple[int, int, int], torch.Tensor]()
    for g, label, score in zip(GIVEN[image], LABELS[image], scores[image], strict=True):
        if min(g[2:]) < 1e-6 or nearest_anchor(g) not in MASK:
            continue
        place = MASK.index(nearest_anchor(g)), int(g[1] * GRID[0]), int(g[0] * GRID[1])
        if place in found:  # it counts, but the last one alone has a gradient
            total = total + found[place].detach()
        found[place] = loss_of_box(x[place[0], :, place[1], place[2]], g, label, score, smooth)
        objects[place] = score
    total = total + torch.stack(list(found.values())).sum()
    for (a, row, column), value in objects.items():
        say = x[a, 4, row, column]
        if value > 1e-5:
            total = total + entropy(say, 1.0) * value
        elif value > -0.5:
            total = total + entropy(say, 0.0)
    return total


@pytest.mark.parametrize(("ignore", "scored", "smooth"), [(0.7, False, True), (0.2, True, False), (0.4, True, True)])
def test_the_loss_of_a_yolo_head(ignore: float, scored: bool, smooth: bool) -> None:
    channels = len(MASK) * (5 + CLASSES)
    given = np.random.default_rng(8).normal(size=(2, channels, *GRID))
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, channels, *GRID], "float64")
        x.stop_gradient = False
        boxes, labels = fluid.data("boxes", [None, 3, 4], "float64"), fluid.data("labels", [None, 3], "int32")
        score = fluid.data("scores", [None, 3], "float64") if scored else None
        settings = {"gt_score": score, "use_label_smooth": smooth}
        loss = L.yolov3_loss(x, boxes, labels, ANCHORS, MASK, CLASSES, ignore, RATIO, **settings)
        fluid.append_backward(L.reduce_sum(loss))
    feed = {"x": given, "boxes": GIVEN, "labels": LABELS, **({"scores": SCORES} if scored else {})}
    one, grad = fluid.Executor().run(main, feed, [loss, "x@GRAD"])
    head = torch.tensor(given, requires_grad=True)
    parts = head.reshape(2, len(MASK), 5 + CLASSES, *GRID)
    weights = SCORES if scored else np.ones_like(SCORES)
    total = torch.stack([loss_of_image(parts[i], i, ignore, weights, smooth) for i in range(2)])
    total.sum().backward()  # type: ignore[no-untyped-call]  # torch
    assert head.grad is not None
    np.testing.assert_allclose(one, total.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(grad, head.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_a_yolo_head_of_other_channels_is_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, boxes = fluid.data("x", [None, 15, *GRID]), fluid.data("boxes", [None, 3, 4])
        labels = fluid.data("labels", [None, 3], "int32")
        with pytest.raises(ProgramError, match="has not the 16 channels of 2 anchors"):
            L.yolov3_loss(x, boxes, labels, ANCHORS, MASK, CLASSES, 0.5, RATIO)
        with pytest.raises(ProgramError, match="anchor_mask is"):
            L.yolov3_loss(x, boxes, labels, ANCHORS, [7], CLASSES, 0.5, RATIO)
