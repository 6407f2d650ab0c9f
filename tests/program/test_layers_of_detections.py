"""What is kept of a detector's boxes: against non-maximum suppression box by box."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.layers.suppression import multiclass_nms2
from penstock.scope import Scope

L: Any = fluid.layers
IMAGES, CLASSES, BOXES = 3, 3, 12
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"score_threshold": 0.1, "nms_top_k": -1, "keep_top_k": -1},
    "few": {"score_threshold": 0.3, "nms_top_k": 5, "keep_top_k": 4, "background_label": -1},
    "pixels": {"score_threshold": 0.0, "nms_top_k": 9, "keep_top_k": 7, "nms_threshold": 0.5, "normalized": False},
    "falling": {"score_threshold": 0.0, "nms_top_k": -1, "keep_top_k": -1, "nms_threshold": 0.9, "nms_eta": 0.8},
}


def _share(a: list[float], b: list[float], one: float) -> float:
    if b[0] > a[2] or b[2] < a[0] or b[1] > a[3] or b[3] < a[1]:
        return 0.0
    shared = (min(a[2], b[2]) - max(a[0], b[0]) + one) * (min(a[3], b[3]) - max(a[1], b[1]) + one)
    areas = [(v[2] - v[0] + one) * (v[3] - v[1] + one) for v in (a, b)]
    return shared / (sum(areas) - shared)


def _kept(boxes: np.ndarray, scores: np.ndarray, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """(class, box) of an image."""
    found: list[tuple[int, int]] = []
    for label in range(CLASSES):
        order = [m for m in range(BOXES) if scores[label, m] > settings["score_threshold"]]
        order.sort(key=lambda m: -scores[label, m])
        own: list[int] = []
        most = settings.get("nms_threshold", 0.3)
        for m in order if settings["nms_top_k"] < 0 else order[: settings["nms_top_k"]]:
            one = 0.0 if settings.get("normalized", True) else 1.0
            if all(_share(boxes[m].tolist(), boxes[k].tolist(), one) <= most for k in own):
                own.append(m)
                most *= settings.get("nms_eta", 1.0) if most > 0.5 else 1.0
        found += [(label, m) for m in own] if label != settings.get("background_label", 0) else []
    best = sorted(found, key=lambda at: -scores[at])
    return sorted(best[: settings["keep_top_k"]], key=lambda at: at[0]) if settings["keep_top_k"] >= 0 else found


def _feed(scale: float) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(2)
    middle, half = draw.random((IMAGES, BOXES, 2)), draw.random((IMAGES, BOXES, 2)) * 0.3
    scores = draw.random((IMAGES, CLASSES, BOXES))
    scores[1] = -1.0  # an image without detections
    return {"boxes": np.concatenate([middle - half, middle + half], 2) * scale, "scores": scores}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_of_boxes_that_overlap_the_best_is_kept(settings: dict[str, Any]) -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        boxes, scores = (
            fluid.data("boxes", [None, BOXES, 4], "float64"),
            fluid.data("scores", [None, CLASSES, BOXES], "float64"),
        )
        found, index = multiclass_nms2(boxes, scores, **settings, return_index=True)
        best = L.reduce_max(found, dim=0)
    assert fluid.Program.parse(str(main)) == main
    feed = _feed(20.0 if settings.get("normalized") is False else 1.0)
    exe = fluid.Executor(fluid.CPUPlace())
    rows, numbers, most = exe.run(main, feed, [found, index, best], scope=Scope(), return_numpy=False)
    kept = [_kept(*one, settings) for one in zip(feed["boxes"], feed["scores"], strict=True)]
    wanted = [
        [label, feed["scores"][n, label, m], *feed["boxes"][n, m]] for n, own in enumerate(kept) for label, m in own
    ]
    assert len(wanted) > 4
    np.testing.assert_array_equal(np.array(rows), wanted)
    assert rows.recursive_sequence_lengths() == [[len(own) for own in kept]]
    assert np.array(numbers)[:, 0].tolist() == [n * BOXES + m for n, own in enumerate(kept) for _, m in own]
    np.testing.assert_array_equal(np.array(most), np.max(wanted, 0))


def test_detections_of_codes_of_priors() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        codes, scores = (
            fluid.data("codes", [None, BOXES, 4], "float64"),
            fluid.data("s", [None, BOXES, CLASSES], "float64"),
        )
        priors = fluid.data("priors", [BOXES, 4], "float64")
        found = L.detection_output(codes, scores, priors, [0.1, 0.1, 0.2, 0.2], score_threshold=0.4, keep_top_k=6)
        boxes = L.box_coder(priors, [0.1, 0.1, 0.2, 0.2], codes, "decode_center_size")
        same = L.multiclass_nms(boxes, L.transpose(L.softmax(scores), [0, 2, 1]), 0.4, 400, 6)
    draw = np.random.default_rng(3)
    feed = {"codes": draw.normal(size=(2, BOXES, 4)), "s": 2 * draw.normal(size=(2, BOXES, CLASSES))}
    feed["priors"] = np.sort(draw.random((BOXES, 2, 2)), 1).reshape(BOXES, 4)
    exe = fluid.Executor(fluid.CPUPlace())
    one, other = exe.run(main, feed, [found, same], scope=Scope())
    assert one.shape[0] > 2
    np.testing.assert_array_equal(one, other)
    feed["s"] = np.zeros_like(feed["s"])
    (none,) = exe.run(main, feed, [found], scope=Scope(), return_numpy=False)
    assert np.array(none).tolist() == [[-1.0]]
    assert none.recursive_sequence_lengths() == [[1]]


def test_numbered_detections_of_none_have_no_rows() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        boxes, scores = fluid.data("boxes", [None, BOXES, 4]), fluid.data("scores", [None, CLASSES, BOXES])
        found, index = multiclass_nms2(boxes, scores, 0.1, 5, 5, return_index=True)
    feed = {"boxes": np.zeros((2, BOXES, 4), np.float32), "scores": np.zeros((2, CLASSES, BOXES), np.float32)}
    rows, numbers = fluid.Executor().run(main, feed, [found, index], return_numpy=False)
    assert (np.array(rows).shape, np.array(numbers).shape) == ((0, 6), (0, 1))
    assert rows.recursive_sequence_lengths() == [[0, 0]]


def test_polygons_are_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        scores = fluid.data("scores", [None, CLASSES, BOXES])
        with pytest.raises(ProgramError, match="There are no polygons here"):
            L.multiclass_nms(fluid.data("boxes", [None, BOXES, 8]), scores, 0.1, 5, 5)
        with pytest.raises(ProgramError, match="3 dimensions"):
            L.multiclass_nms(fluid.data("rows", [None, 4]), scores, 0.1, 5, 5)
