"""Boxes of detectors: priors, anchors, overlaps, codes and heads against the formulas of Fluid's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.program.layer_cases import Case, Ints, compare

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers


def _iou(x: torch.Tensor, y: torch.Tensor, one: float = 0.0) -> torch.Tensor:
    made = torch.zeros(len(x), len(y), dtype=x.dtype)
    for i, a in enumerate(x.tolist()):
        for j, b in enumerate(y.tolist()):
            wide = max(min(a[2], b[2]) - max(a[0], b[0]) + one, 0.0)
            high = max(min(a[3], b[3]) - max(a[1], b[1]) + one, 0.0)
            areas = [(v[2] - v[0] + one) * (v[3] - v[1] + one) for v in (a, b)]
            made[i, j] = wide * high / (sum(areas) - wide * high)
    return made


def _encoded(prior: torch.Tensor, var: torch.Tensor, target: torch.Tensor, one: float = 0.0) -> torch.Tensor:
    made = torch.zeros(len(target), len(prior), 4, dtype=prior.dtype)
    for i, t in enumerate(target.tolist()):
        for j, p in enumerate(prior.tolist()):
            pw, ph = p[2] - p[0] + one, p[3] - p[1] + one
            codes = [
                ((t[2] + t[0]) / 2 - (p[0] + pw / 2)) / pw,
                ((t[3] + t[1]) / 2 - (p[1] + ph / 2)) / ph,
                math.log(abs((t[2] - t[0] + one) / pw)),
                math.log(abs((t[3] - t[1] + one) / ph)),
            ]
            made[i, j] = torch.tensor(codes, dtype=prior.dtype) / var[j % len(var)]
    return made


def _decoded(prior: torch.Tensor, var: torch.Tensor, target: torch.Tensor, axis: int, one: float) -> torch.Tensor:
    made = torch.zeros_like(target)
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            k = i if axis else j
            p, v, t = prior[k].tolist(), var[k % len(var)].tolist(), target[i, j].tolist()
            pw, ph = p[2] - p[0] + one, p[3] - p[1] + one
            x, y = v[0] * t[0] * pw + p[0] + pw / 2, v[1] * t[1] * ph + p[1] + ph / 2
            w, h = math.exp(v[2] * t[2]) * pw, math.exp(v[3] * t[3]) * ph
            made[i, j] = torch.tensor([x - w / 2, y - h / 2, x + w / 2 - one, y + h / 2 - one], dtype=target.dtype)
    return made


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


ANCHORS = [10, 13, 16, 30]


def _yolo(x: torch.Tensor, sizes: torch.Tensor, clip: bool) -> torch.Tensor:
    """Boxes and scores side by side: 2 anchors, 3 classes, 2 x 2 places, each of 32 pixels."""
    made = torch.zeros(len(x), 8, 7, dtype=x.dtype)
    for n in range(len(x)):
        height, width = (int(v) + 40 for v in sizes[n])
        for a in range(2):
            for row in range(2):
                for column in range(2):
                    t = x[n, a * 8 : a * 8 + 8, row, column].tolist()
                    if _sigmoid(t[4]) < 0.5:
                        continue
                    cx, cy = (column + _sigmoid(t[0])) * width / 2, (row + _sigmoid(t[1])) * height / 2
                    w = math.exp(t[2]) * ANCHORS[2 * a] * width / 64
                    h = math.exp(t[3]) * ANCHORS[2 * a + 1] * height / 64
                    box = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]
                    if clip:
                        box = [max(box[0], 0), max(box[1], 0), min(box[2], width - 1), min(box[3], height - 1)]
                    scores = [_sigmoid(t[4]) * _sigmoid(one) for one in t[5:]]
                    made[n, a * 4 + row * 2 + column] = torch.tensor([*box, *scores], dtype=x.dtype)
    return made


def _yolo_layer(clip: bool) -> Callable[..., Any]:
    return lambda x, sizes: L.concat(L.yolo_box(x, sizes + 40, ANCHORS, 3, 0.5, 32, clip), 2)


def _corners(x: torch.Tensor) -> torch.Tensor:
    places = torch.zeros_like(x)
    for _, c, h, w in np.ndindex(*x.shape):
        places[:, c, h, w] = 4 * (h if c % 2 else w)
    return places - x


def _focal(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    rows = []
    for i, g in enumerate(label.reshape(-1).tolist()):
        p = x[i].sigmoid()
        for d in range(x.shape[1]):
            if g - 1 == d + 1:
                rows.append(-((1 - p[d]) ** 1.5) * p[d].log() * 0.3 / 5)
            else:
                rows.append(-(p[d] ** 1.5) * (1 - p[d]).log() * 0.7 / 5 * (g - 1 != -1))
    return torch.stack(rows).reshape(x.shape)


def _priors(rows: int = 4) -> Any:
    return L.assign(np.random.default_rng(1).normal(size=(rows, 4)))


VAR = torch.tensor([[0.1, 0.1, 0.2, 0.2]], dtype=torch.float64)
NUMBERS = [0.1, 0.1, 0.2, 0.2]
PRIORS = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 4)))
CASES: dict[str, Case] = {
    "iou_similarity": (((4,),), lambda x: L.iou_similarity(x, _priors()), lambda x, **_: _iou(x, PRIORS)),
    "iou_similarity of pixels": (
        ((4,),),
        lambda x: L.iou_similarity(x * 9.0, _priors(), False),
        lambda x, **_: _iou(x * 9, PRIORS, 1.0),
    ),
    "box_coder": (((4,),), lambda x: L.box_coder(_priors(), NUMBERS, x), lambda x, **_: _encoded(PRIORS, VAR, x)),
    "box_coder of pixels": (
        ((4,),),
        lambda x: L.box_coder(_priors(), _priors() + 3.0, x, box_normalized=False),
        lambda x, **_: _encoded(PRIORS, PRIORS + 3, x, 1.0),
    ),
    "box_coder back": (
        ((4, 4),),
        lambda x: L.box_coder(_priors(), NUMBERS, x, "decode_center_size"),
        lambda x, **_: _decoded(PRIORS, VAR, x, 0, 0.0),
    ),
    "box_coder back, of the rows": (
        ((2, 4), (4,)),
        lambda x, p: L.box_coder(p, p + 3.0, x, "decode_center_size", False, axis=1),
        lambda x, p: _decoded(p, p + 3, x, 1, 1.0),
    ),
    "yolo_box": (((16, 2, 2), Ints(50, (2,), "int32")), _yolo_layer(True), lambda x, s: _yolo(x, s, True)),
    "yolo_box beyond": (((16, 2, 2), Ints(50, (2,), "int32")), _yolo_layer(False), lambda x, s: _yolo(x, s, False)),
    "polygon_box_transform": (((4, 2, 3),), L.polygon_box_transform, _corners),
    "sigmoid_focal_loss": (
        ((3,), Ints(5, (1,), "int32")),
        lambda x, label: L.sigmoid_focal_loss(x, label - 1, L.fill_constant([1], "int32", 5), 1.5, 0.3),
        _focal,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_layer_of_boxes_equals_its_formula(case: Case) -> None:
    compare(case)


def _run(fetches: list[Any], main: Any, **feed: Any) -> list[np.ndarray]:
    return [np.array(v) for v in fluid.Executor(fluid.CPUPlace()).run(main, feed, fetches, scope=Scope())]


def test_boxes_of_an_image_are_clipped_to_it() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        boxes = L.data("boxes", [8], dtype="float64", lod_level=1)
        clipped = L.box_clip(boxes, fluid.data("info", [None, 3], "float64"))
        with pytest.raises(ProgramError, match="box_clip needs the boxes of each image as a sequence"):
            L.box_clip(fluid.data("plain", [None, 4]), fluid.data("info4", [None, 3]))
    rows = np.random.default_rng(0).normal(scale=30.0, size=(3, 8))
    info = np.array([[50.0, 31.0, 2.0], [20.0, 70.0, 1.0]])
    (found,) = _run([clipped], main, boxes=fluid.create_lod_tensor(rows, [[2, 1]]), info=info)
    limits = [[15.0, 24.0] * 4, [15.0, 24.0] * 4, [69.0, 19.0] * 4]  # 15.5 is rounded to 16
    np.testing.assert_array_equal(found, np.clip(rows, 0, limits))


# ---------------------------------------------------------------- priors


def test_priors_are_squares_and_ratios_at_each_place() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x, image = fluid.data("x", [None, 8, 2, 3], "float64"), fluid.data("image", [None, 3, 20, 60], "float64")
        plain = L.prior_box(x, image, [4.0, 9.0], [9.0, 16.0], [1.0, 4.0, 4.0], flip=True)
        ordered = L.prior_box(x, image, 4.0, 9.0, 4.0, steps=[8.0, 6.0], offset=0.25, min_max_aspect_ratios_order=True)
        clipped = L.prior_box(x, image, [40.0], clip=True)
        with pytest.raises(ProgramError, match="1 min_sizes and 2 max_sizes"):
            L.prior_box(x, image, [4.0], [9.0, 16.0])
        with pytest.raises(ProgramError, match="a known size along dimension 2"):
            L.prior_box(x, fluid.data("other", [None, 3, None, 4]), [4.0])
    (boxes, variance), (second, _), (cut, _) = plain, ordered, clipped
    boxes, variance, second, cut = _run([boxes, variance, second, cut], main)
    assert (boxes.shape, second.shape, cut.shape) == ((2, 3, 8, 4), (2, 3, 3, 4), (2, 3, 1, 4))
    sides = [(4, 4), (8, 2), (2, 8), (6, 6), (9, 9), (18, 4.5), (4.5, 18), (12, 12)]
    for row, column in np.ndindex(2, 3):
        x, y = (column + 0.5) * 20, (row + 0.5) * 10
        wanted = [[(x - w / 2) / 60, (y - h / 2) / 20, (x + w / 2) / 60, (y + h / 2) / 20] for w, h in sides]
        np.testing.assert_allclose(boxes[row, column], wanted, rtol=1e-12)
        x, y = (column + 0.25) * 8, (row + 0.25) * 6
        wanted = [
            [(x - w / 2) / 60, (y - h / 2) / 20, (x + w / 2) / 60, (y + h / 2) / 20]
            for w, h in [(4, 4), (6, 6), (8, 2)]
        ]
        np.testing.assert_allclose(second[row, column], wanted, rtol=1e-12)
    np.testing.assert_array_equal(variance, np.broadcast_to(NUMBERS, boxes.shape))
    np.testing.assert_allclose(cut[0, 0, 0], [0, 0, 0.5, 1])


def test_dense_priors_lie_around_each_place() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x, image = fluid.data("x", [None, 8, 2, 3], "float64"), fluid.data("image", [None, 3, 20, 60], "float64")
        box, _ = L.density_prior_box(x, image, [2, 1], [3.0, 8.0], [1.0, 4.0])
        flat, variance = L.density_prior_box(x, image, [2], [3.0], [1.0], flatten_to_2d=True, clip=True)
        with pytest.raises(ProgramError, match="as many densities as sizes"):
            L.density_prior_box(x, image, [2], [3.0, 4.0], [1.0])
    found, line, same = _run([box, flat, variance], main)
    assert (found.shape, line.shape, same.shape) == ((2, 3, 10, 4), (24, 4), (24, 4))
    wanted = []
    x, y, average = 30.0, 15.0, 15
    for count, size in ((2, 3.0), (1, 8.0)):
        shift = average // count
        for ratio in (1.0, 2.0):
            for i, j in np.ndindex(count, count):
                cx, cy = x - average / 2 + shift / 2 + j * shift, y - average / 2 + shift / 2 + i * shift
                w, h = size * ratio / 2, size / ratio / 2
                wanted.append(
                    [max((cx - w) / 60, 0), max((cy - h) / 20, 0), min((cx + w) / 60, 1), min((cy + h) / 20, 1)]
                )
    np.testing.assert_allclose(found[1, 1], wanted, rtol=1e-12)
    np.testing.assert_allclose(line.reshape(2, 3, 4, 4)[1, 1], np.clip(wanted[:4], 0, 1), rtol=1e-12)


def test_anchors_have_rounded_sides() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 8, 2, 3], "float64")
        anchors, _ = L.anchor_generator(x, [64.0, 128.0], [0.5, 2.0], stride=[16.0, 16.0])
        with pytest.raises(ProgramError, match="stride is None; expected two numbers"):
            L.anchor_generator(x, [64.0], [1.0])
    (found,) = _run([anchors], main)
    wanted = []
    for base in ((23, 12), (11, 22)):  # √(256 / ratio), and that times the ratio
        for size in (4, 8):
            w, h = size * base[0] - 1, size * base[1] - 1
            wanted.append([2 * 16 + 7.5 - w / 2, 16 + 7.5 - h / 2, 2 * 16 + 7.5 + w / 2, 16 + 7.5 + h / 2])
    np.testing.assert_allclose(found[1, 2], wanted, rtol=1e-12)


def test_a_head_predicts_for_the_priors_of_all_maps() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        image = fluid.data("image", [None, 3, 32, 32])
        maps = [L.conv2d(image, 4, 3, stride, 1) for stride in (4, 8, 16)]
        places, classes, boxes, variances = L.multi_box_head(
            maps, image, 32, 5, [[2.0], [2.0, 3.0], [2.0]], 20, 90, clip=True
        )
        with pytest.raises(ProgramError, match="of 2 feature maps needs min_sizes and max_sizes"):
            L.multi_box_head(maps[:2], image, 32, 5, [[2.0]] * 2, 20, 90)
        with pytest.raises(ProgramError, match="1 aspect_ratios for 3 feature maps"):
            L.multi_box_head(maps, image, 32, 5, [[2.0]], 20, 90)
        pairs = fluid.append_backward(L.reduce_mean(places) + L.reduce_mean(classes))
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    feed = {"image": np.ones((2, 3, 32, 32), np.float32)}
    found = exe.run(main, feed, [places, classes, boxes, variances, pairs[0][1]], scope=scope)
    count = 8 * 8 * 4 + 4 * 4 * 6 + 2 * 2 * 4
    assert [v.shape for v in found[:4]] == [(2, count, 4), (2, count, 5), (count, 4), (count, 4)]
    np.testing.assert_allclose(found[2][0], [0.0125, 0.0125, 0.1125, 0.1125], rtol=1e-6)
    assert np.abs(found[4]).sum() > 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x: L.box_coder(x, None, x, "center"), "code_type is 'center'"),
        (lambda x: L.box_coder(x, None, x, "decode_center_size"), "3 dimensions"),
        (lambda x: L.yolo_box(L.reshape(x, [-1, 4, 1, 1]), x, [1, 2], 3, 0.5, 32), "has not the 8 channels"),
        (lambda x: L.polygon_box_transform(L.reshape(x, [-1, 1, 2, 2])), "an even number of channels"),
    ],
)
def test_wrong_boxes_are_refused(wrong: Callable[[Any], Any], text: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()), pytest.raises(ProgramError, match=text):
        wrong(fluid.data("x", [None, 4]))
