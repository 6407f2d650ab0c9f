"""Boxes matched with priors, and SSD's loss of them: against the steps of Fluid's kernels, written one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.program.test_layers_of_boxes import _encoded, _iou

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers
PRIORS, CLASSES, VARIANCE = 8, 3, [0.1, 0.1, 0.2, 0.2]


def _boxes(rows: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).random((rows, 2, 2)), 1).reshape(rows, 4)


def _match(close: np.ndarray, least: float | None) -> list[int]:
    """Pairs from the closest on; then, with `least`, the closest row of each column that is left."""
    found, rows = [-1] * close.shape[1], set(range(len(close)))
    pairs = sorted(np.ndindex(*close.shape), key=lambda at: -close[at])
    for row, column in pairs:
        if row in rows and found[column] < 0 and close[row, column] >= 1e-6:
            found[column] = row
            rows.remove(row)
    for column, row in enumerate(close.argmax(0)):
        if found[column] < 0 and least is not None and close[row, column] >= least:
            found[column] = int(row)
    return found


def _run(main: Any, fetches: list[Any], **feed: Any) -> list[np.ndarray]:
    return [np.array(v) for v in fluid.Executor(fluid.CPUPlace()).run(main, feed, fetches, scope=Scope())]


@pytest.mark.parametrize("least", [None, 0.2])
def test_each_column_gets_the_closest_row_that_is_left(least: float | None) -> None:
    kind = None if least is None else "per_prediction"
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x = L.data("x", [5], dtype="float64", lod_level=1)
        indices, values = L.bipartite_match(x, kind, least)
        alone, _ = L.bipartite_match(fluid.data("y", [8, 5], "float64"), kind, least)
        assert fluid.Program.parse(str(main)) == main
    close = np.random.default_rng(4).random((10, 5)) - 0.3
    parts = [close[:2], close[2:2], close[2:]]
    found, near, plain = _run(
        main, [indices, values, alone], x=fluid.create_lod_tensor(close, [[2, 0, 8]]), y=close[2:]
    )
    wanted = [_match(part, least) if len(part) else [-1] * 5 for part in parts]
    np.testing.assert_array_equal(found, wanted)
    assert (found.dtype.name, plain.tolist()) == ("int32", [wanted[2]])
    expected = [
        [part[r, c] if r >= 0 else 0.0 for c, r in enumerate(row)] for part, row in zip(parts, wanted, strict=True)
    ]
    np.testing.assert_array_equal(near, expected)


def test_of_equal_ones_the_first_column_is_matched() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        found, _ = L.bipartite_match(fluid.data("y", [None, 3], "float64"))
    assert _run(main, [found], y=np.full((2, 3), 0.5))[0].tolist() == [[0, 1, -1]]
    many = np.full((130, 3), 1e-7)  # Fluid sorts so many, and takes whatever is close at all
    assert (_run(main, [found], y=many)[0] >= 0).all()
    assert _run(main, [found], y=many[:129])[0].tolist() == [[-1, -1, -1]]


def test_targets_are_those_of_the_matched_rows() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x = L.data("x", [2, 3], dtype="float64", lod_level=1)
        matched, no = fluid.data("matched", [None, 4], "int32"), L.data("no", [1], dtype="int32", lod_level=1)
        plain = L.target_assign(x, matched, mismatch_value=7)
        negative = L.target_assign(x, matched, no)
    rows = np.random.default_rng(0).normal(size=(3, 2, 3))
    at = np.array([[1, -1, 0, -1], [-1, 0, -1, -1]], np.int32)
    feed = {"x": fluid.create_lod_tensor(rows, [[2, 1]]), "matched": at}
    feed["no"] = fluid.create_lod_tensor(np.array([[3], [0], [1]], np.int32), [[1, 2]])
    found, weights, again, others = _run(main, [*plain, *negative], **feed)
    wanted = np.full((2, 4, 3), 7.0)
    wanted[0, 0], wanted[0, 2], wanted[1, 1] = rows[1, 0], rows[0, 0], rows[2, 1]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(weights[:, :, 0], at >= 0)
    wanted[wanted == 7.0] = 0.0
    wanted[1, 1] = 0.0  # matched, but negative
    np.testing.assert_array_equal(again, wanted)
    np.testing.assert_array_equal(others[:, :, 0], [[1, 0, 1, 1], [1, 1, 0, 0]])


def test_images_without_boxes_have_no_targets() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        box, matched = L.data("box", [4], dtype="float64", lod_level=1), fluid.data("m", [None, 3], "int32")
        found = L.target_assign(L.reshape(box, [-1, 1, 4]), matched, mismatch_value=7)
    feed = {"box": fluid.create_lod_tensor(np.zeros((0, 4)), [[0, 0]]), "m": np.full((2, 3), -1, np.int32)}
    targets, weights = fluid.Executor(fluid.CPUPlace()).run(main, feed, found)
    assert targets.shape == (2, 3, 4) and (targets == 7).all() and not weights.any()


def _ssd(place: torch.Tensor, scores: torch.Tensor, boxes: list[Any], labels: list[Any], priors: Any) -> torch.Tensor:
    """The loss of each image before it is divided, and the number of matched priors."""
    losses, total = [], 0
    for n, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        close = _iou(torch.from_numpy(box), priors).numpy()
        match = _match(close, 0.3)
        codes = _encoded(priors, torch.tensor([VARIANCE], dtype=torch.float64), torch.from_numpy(box))
        classes = [int(label[row]) if row >= 0 else 0 for row in match]
        entropy = F.cross_entropy(scores[n], torch.tensor(classes), reduction="none")
        near = [close[row, w] if row >= 0 else 0.0 for w, row in enumerate(match)]
        free = [w for w in range(PRIORS) if match[w] < 0 and near[w] < 0.5]
        worst = sorted(free, key=lambda w: -float(entropy[w].detach()))[
            : math.floor(1.5 * sum(row >= 0 for row in match))
        ]
        loss = torch.zeros((), dtype=torch.float64)
        for w, row in enumerate(match):
            if row >= 0:
                total += 1
                loss = loss + 2.0 * F.smooth_l1_loss(place[n, w], codes[row, w], reduction="sum")
            if row >= 0 or w in worst:
                loss = loss + 0.5 * entropy[w]
        losses.append(loss)
    return torch.stack(losses) / total


def test_the_loss_of_ssd_equals_its_steps() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        place, scores = (
            fluid.data("place", [None, PRIORS, 4], "float64"),
            fluid.data("s", [None, PRIORS, CLASSES], "float64"),
        )
        place.stop_gradient = scores.stop_gradient = False
        box, label = L.data("box", [4], dtype="float64", lod_level=1), L.data("label", [1], dtype="int32", lod_level=1)
        priors = fluid.data("priors", [PRIORS, 4], "float64")
        loss = L.ssd_loss(
            place, scores, box, label, priors, VARIANCE, overlap_threshold=0.3, neg_pos_ratio=1.5, loc_loss_weight=2.0,
            conf_loss_weight=0.5,
        )  # fmt: skip
        fluid.append_backward(L.reduce_sum(loss * loss))
        with pytest.raises(ProgramError, match="mining_type is 'hard_example'"):
            L.ssd_loss(place, scores, box, label, priors, mining_type="hard_example")
        with pytest.raises(ProgramError, match="match_type is 'best'"):
            L.bipartite_match(box, "best")
        with pytest.raises(ProgramError, match="target_assign needs targets with sequences"):
            L.target_assign(place, fluid.data("m", [None, PRIORS], "int32"))
    for lengths in ([2, 1], [1, 3, 2]):
        draw = np.random.default_rng(len(lengths))
        x = torch.from_numpy(draw.normal(size=(len(lengths), PRIORS, 4))).requires_grad_()
        y = torch.from_numpy(draw.normal(size=(len(lengths), PRIORS, CLASSES))).requires_grad_()
        boxes, fixed = _boxes(sum(lengths), 5), _boxes(PRIORS, 6)
        labels = draw.integers(1, CLASSES, size=(sum(lengths), 1)).astype(np.int32)
        ends = np.cumsum(lengths)[:-1]
        wanted = _ssd(x, y, np.split(boxes, ends), np.split(labels[:, 0], ends), torch.from_numpy(fixed))
        (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
        feed = {"place": x.detach().numpy(), "s": y.detach().numpy(), "priors": fixed}
        feed["box"], feed["label"] = (fluid.create_lod_tensor(v, [lengths]) for v in (boxes, labels))
        found, to_place, to_scores = _run(main, [loss, "place@GRAD", "s@GRAD"], **feed)
        np.testing.assert_allclose(found[:, 0], wanted.detach(), rtol=1e-10)
        for got, leaf in ((to_place, x), (to_scores, y)):
            assert leaf.grad is not None
            np.testing.assert_allclose(got, leaf.grad, rtol=1e-9, atol=1e-12)
