"""Mean average precision of detections: against the steps of Fluid's kernel, written one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.program.layers.suppression import multiclass_nms2
from penstock.scope import Scope

L: Any = fluid.layers
CLASSES, OVERLAP = 4, 0.3
LENGTHS, OF_BOXES = [7, 0, 9, 4], [3, 2, 0, 5]  # an image without detections, one without boxes
Images = list[tuple[np.ndarray, np.ndarray]]


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Detections, of which many lie close to a box of their image, and boxes: (label, difficult, box)."""
    draw = np.random.default_rng(seed)
    corners = draw.random((sum(OF_BOXES), 2)) * 0.6
    boxes = np.hstack([corners, corners + 0.1 + 0.3 * draw.random(corners.shape)])
    labels = draw.integers(1, CLASSES, (len(boxes), 1))
    given = np.hstack([labels, draw.random(labels.shape) < 0.3, boxes])
    found = []
    for image, length in enumerate(LENGTHS):
        own = given[sum(OF_BOXES[:image]) : sum(OF_BOXES[: image + 1])]
        own = own if len(own) else given[:2]
        near = own[draw.integers(0, len(own), length)]
        label = np.where(draw.random(length) < 0.8, near[:, 0], draw.integers(0, CLASSES, length))
        score = draw.integers(0, 8, length) / 8  # some are equal
        found.append(np.column_stack([label, score, near[:, 2:] + draw.normal(0, 0.06, (length, 4))]))
    return np.vstack(found).astype("float32"), given.astype("float32")


def images(found: np.ndarray, given: np.ndarray) -> Images:
    parts = [np.split(rows, np.cumsum(own)[:-1]) for rows, own in ((found, LENGTHS), (given, OF_BOXES))]
    return list(zip(*parts, strict=True))


def share(a: np.ndarray, b: np.ndarray) -> float:
    if b[0] > a[2] or b[2] < a[0] or b[1] > a[3] or b[3] < a[1]:
        return 0.0
    both = (min(a[2], b[2]) - max(a[0], b[0])) * (min(a[3], b[3]) - max(a[1], b[1]))
    return float(both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both))


def marks_of_class(label: int, seen: Images, takes_all: bool) -> tuple[list[tuple[float, int]], int]:
    """(score, right or not) of each detection of a class, and how many boxes it has."""
    marks: list[tuple[float, int]] = []
    count = 0
    for found, given in seen:
        boxes = [row for row in given if int(row[0]) == label]
        count += sum(1 for row in boxes if takes_all or not row[1])
        visited: set[int] = set()
        rows = [row for row in found if int(row[0]) == label]
        for row in sorted(rows, key=lambda one: -one[1]) if boxes else rows:
            shares = [share(np.clip(row[2:], 0, 1), box[2:]) for box in boxes]
            best = int(np.argmax(shares)) if shares else 0
            if not shares or shares[best] <= OVERLAP:
                marks.append((row[1], 0))
            elif takes_all or not boxes[best][1]:
                marks.append((row[1], int(best not in visited)))
                visited.add(best)
    return sorted(marks, key=lambda one: -one[0]), count


def precision_of(marks: list[tuple[float, int]], count: int, kind: str) -> float:
    hits, points = 0, []
    for place, (_, is_right) in enumerate(marks, start=1):
        hits += is_right
        points.append((hits / place, hits / count))
    if kind == "11point":
        return sum(max([p for p, r in points if r >= at / 10 - 1e-9], default=0.0) for at in range(11)) / 11
    total = before = 0.0
    for precision, recall in points:
        total, before = total + precision * (recall - before), recall
    return total


def wanted(seen: Images, kind: str, *, takes_all: bool = True) -> float:
    classes = [marks_of_class(label, seen, takes_all) for label in range(CLASSES)]
    values = [precision_of(marks, count, kind) for marks, count in classes if count]
    return sum(values) / len(values)


def tensor(rows: np.ndarray, lengths: list[int]) -> Any:
    return fluid.create_lod_tensor(rows, [lengths], fluid.CPUPlace())


def run(main: Any, fetches: list[Any], found: np.ndarray, given: np.ndarray) -> list[float]:
    feed = {"found": tensor(found, LENGTHS), "given": tensor(given, OF_BOXES)}
    parts = {"label": given[:, :1], "difficult": given[:, 1:2], "box": given[:, 2:]}
    feed |= {name: tensor(rows, OF_BOXES) for name, rows in parts.items()}
    asked = {name: value for name, value in feed.items() if name in main.variables}
    values = fluid.Executor(fluid.CPUPlace()).run(main, asked, fetches, scope=Scope())
    assert all((value.dtype, value.shape) == (np.float32, (1,)) for value in values)
    return [float(value[0]) for value in values]


def ragged(name: str, width: int) -> Any:
    return L.data(name, [width], dtype="float32", lod_level=1)


@pytest.mark.parametrize("kind", ["integral", "11point"])
@pytest.mark.parametrize("takes_all", [True, False])
def test_the_mean_average_precision_is_fluids(kind: str, takes_all: bool) -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        found, given = ragged("found", 6), ragged("given", 6)
        made = L.detection_map(found, given, CLASSES, 0, OVERLAP, takes_all, ap_version=kind)
        plain = L.detection_map(found, L.concat([given[:, :1], given[:, 2:]], 1), CLASSES, ap_version=kind)
        assert fluid.Program.parse(str(main)) == main
    results = set()
    for seed in range(6):
        rows = batch(seed)
        of_all = wanted(images(*rows), kind)
        expected = [wanted(images(*rows), kind, takes_all=takes_all), of_all]
        np.testing.assert_allclose(run(main, [made, plain], *rows), expected, rtol=2e-6)
        results.add(round(of_all, 4))
    assert len(results) > 4
    assert 0 < min(results) < max(results) < 1


@pytest.mark.parametrize("kind", ["integral", "11point"])
def test_runs_are_summed_up_until_they_are_reset(kind: str) -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        parts = [ragged("label", 1), ragged("box", 4), ragged("difficult", 1)]
        metric = fluid.metrics.DetectionMAP(
            ragged("found", 6), *parts, class_num=CLASSES, overlap_threshold=OVERLAP, ap_version=kind
        )
    for _ in range(2):
        seen: Images = []
        for seed in range(3):
            rows = batch(seed)
            seen += images(*rows)
            found = run(main, list(metric.get_map_var()), *rows)
            np.testing.assert_allclose(found, [wanted(images(*rows), kind), wanted(seen, kind)], rtol=2e-6)
        metric.reset(fluid.Executor(fluid.CPUPlace()))


def test_kept_boxes_are_compared_with_those_that_are_there() -> None:
    boxes = np.array([[[0.1, 0.1, 0.4, 0.4], [0.6, 0.6, 0.9, 0.9]]] * 2, "float32")
    given = np.array([[1, 0.1, 0.1, 0.4, 0.4], [1, 0.6, 0.6, 0.9, 0.9]], "float32")
    for layer in (L.multiclass_nms, multiclass_nms2):
        with fluid.program_guard(main := fluid.Program(), fluid.Program()):
            scores = fluid.data("scores", [None, 2, 2], "float32")
            kept = layer(fluid.data("boxes", [None, 2, 4], "float32"), scores, 0.05, -1, -1)
            made = L.detection_map(kept, ragged("given", 5), 2)
        feed = {"boxes": boxes, "given": tensor(given, [1, 1])}
        exe = fluid.Executor(fluid.CPUPlace())
        # The best of both images is the first box, which is right in the first image; the other one in the second.
        for best, precision in (([0.9, 0.1], 0.75), ([0.0, 0.0], 0.0)):
            scored = np.array([[[0, 0], best]] * 2, "float32")
            (value,) = exe.run(main, {**feed, "scores": scored}, [made], scope=Scope())
            np.testing.assert_allclose(value, [precision], rtol=1e-6)


def test_what_no_run_can_take_is_refused() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        found, given = ragged("found", 6), ragged("given", 6)
        made = L.detection_map(found, given, 2)
        with pytest.raises(ProgramError, match=r"fluid\.metrics\.DetectionMAP sums up"):
            L.detection_map(found, given, 2, has_state=found)
        with pytest.raises(ProgramError, match="ap_version is '12point'; expected one of integral, 11point"):
            L.detection_map(found, given, 2, ap_version="12point")
        with pytest.raises(ProgramError, match="needs a sequence of rows for each image"):
            L.detection_map(found, fluid.data("plain", [None, 6], "float32"), 2)
        with pytest.raises(ProgramError, match="needs boxes of five or six numbers"):
            L.detection_map(found, ragged("box", 4), 2)
        with pytest.raises(ProgramError, match="needs class_num"):
            fluid.metrics.DetectionMAP(found, given, given)
    rows = batch(0)
    with pytest.raises(OperatorError, match="boxes have labels 1 to 3, and there are 2 classes"):
        run(main, [made], *rows)
