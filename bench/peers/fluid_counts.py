"""Metrics whose numbers are compared with PaddlePaddle's: layers of fluid.layers, fluid.metrics, fluid.evaluator.

As in `fluid_cases`: `paddle_counts` runs them with paddlepaddle 2.6.2 or, where it has no kernel, by formulas that are
here; tests/program/test_counts_equal_fluid.py runs them with Penstock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.peers.fluid_cases import Array, values

Batch = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class CountCase:
    """A layer over batches; what it returns for each, in order.

    `batches`: arrays by the layer's arguments, rows of sequences where there are `lengths`. `parameters`: by the
    argument that names them. `operator`, `slots`, `outputs`, `attributes`: how Fluid calls it; the results' slots are
    those that are compared, `beside` others. Without `operator`, `formula` gets all batches so far.
    """

    layer: str
    batches: tuple[Batch, ...]
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parameters: Batch = field(default_factory=dict)
    operator: str = ""
    slots: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] | None = None
    formula: str = ""


def _drawn(shape: Sequence[int], seed: int, below: int) -> Array:
    places = np.arange(math.prod(shape), dtype=np.int64)
    return ((places * places * 7 + places * 3 + seed * 5) // 3 % 11 % below).reshape(shape)


LENGTHS = (5, 1, 4)
_CHUNKS = {"num_chunk_types": 2}
_KINDS = {"IOB": 2, "IOE": 2, "IOBES": 4, "plain": 1}


def _chunks(scheme: str, seed: int, excluded: tuple[int, ...] = ()) -> CountCase:
    outside = 2 * _KINDS[scheme]
    wanted = [_drawn((10, 1), seed + k, outside + 1) for k in range(2)]
    other = _drawn((10, 1), seed + 9, outside + 1)
    found = [np.where(values((10, 1), seed + 5 + k) > 0.25, other, v) for k, v in enumerate(wanted)]
    more = {"excluded_chunk_types": list(excluded)} if excluded else {}
    counts = ("NumInferChunks", "NumLabelChunks", "NumCorrectChunks")
    return CountCase(
        "chunk_eval",
        tuple({"input": one, "label": other} for one, other in zip(found, wanted, strict=True)),
        dict.fromkeys(("input", "label"), LENGTHS),
        {"chunk_scheme": scheme, **_CHUNKS, **more},
        operator="chunk_eval",
        slots={"Inference": "input", "Label": "label"},
        outputs=dict.fromkeys(("Precision", "Recall", "F1-Score"), "float32") | dict.fromkeys(counts, "int64"),
    )


_TEXTS = {"input": _drawn((9, 1), 31, 4), "label": _drawn((8, 1), 32, 4)}
_TEXT_LENGTHS = {"input": (4, 3, 2), "label": (3, 3, 2)}


def _distance(*, normalized: bool) -> CountCase:
    return CountCase(
        "edit_distance",
        (_TEXTS, {"input": _drawn((9, 1), 33, 3), "label": _drawn((8, 1), 34, 3)}),
        _TEXT_LENGTHS,
        {"normalized": normalized},
        operator="edit_distance",
        slots={"Hyps": "input", "Refs": "label"},
        outputs={"Out": "float32", "SequenceNum": "int64"},
    )


_FOUND = np.array(
    [
        [1, 0.875, 0.0, 0.0, 0.5, 0.5],
        [1, 0.75, 0.0, 0.125, 0.5, 0.5],
        [2, 0.5, 0.5, 0.5, 1.0, 1.0],
        [1, 0.625, 0.5, 0.0, 1.0, 0.5],
        [2, 0.375, 0.0, 0.5, 0.5, 1.0],
        [2, 0.25, 0.125, 0.125, 0.625, 0.625],
        [1, 0.125, 0.25, 0.25, 0.75, 0.75],
    ],
    dtype=np.float32,
)
_BOXES = np.array(
    [
        [1, 0, 0.0, 0.0, 0.5, 0.4375],
        [2, 1, 0.5, 0.5, 1.0, 0.9375],
        [1, 0, 0.5, 0.0625, 1.0, 0.5],
        [2, 0, 0.125, 0.125, 0.5625, 0.625],
        [1, 1, 0.25, 0.25, 0.75, 0.6875],
    ],
    dtype=np.float32,
)
BOXES = ({"detect_res": _FOUND, "label": _BOXES}, {"detect_res": _FOUND[::-1].copy(), "label": _BOXES[::-1].copy()})
BOX_LENGTHS = {"detect_res": (3, 4), "label": (2, 3)}
BOX_CLASSES = 3


def _precision(**arguments: Any) -> CountCase:
    given = {"overlap_threshold": 0.5, "evaluate_difficult": True, "ap_version": "integral", **arguments}
    kinds = {"class_num": BOX_CLASSES, "background_label": 0, "ap_type": given["ap_version"]}
    return CountCase(
        "detection_map",
        BOXES,
        BOX_LENGTHS,
        {"class_num": BOX_CLASSES, **given},
        operator="detection_map",
        slots={"DetectRes": "detect_res", "Label": "label"},
        outputs={"MAP": "float32"},
        beside={"AccumPosCount": "int32", "AccumTruePos": "float32", "AccumFalsePos": "float32"},
        attributes={**kinds, **{k: v for k, v in given.items() if k != "ap_version"}},
    )


_TRANSITION = {"param_attr": values((5, 3), 42)}
_EMISSIONS = tuple({"input": values((10, 3), 43 + k, -2.0, 2.0)} for k in range(2))
_TAGGED = tuple({**one, "label": _drawn((10, 1), 47 + k, 3)} for k, one in enumerate(_EMISSIONS))


def _path(batches: tuple[Batch, ...]) -> CountCase:
    slots = {"Emission": "input", "Transition": "param_attr", "Label": "label"}
    return CountCase(
        "crf_decoding",
        batches,
        dict.fromkeys(batches[0], LENGTHS),
        parameters=_TRANSITION,
        operator="crf_decoding",
        slots={slot: name for slot, name in slots.items() if name in batches[0] or name == "param_attr"},
        outputs={"ViterbiPath": "int64"},
    )


_CLICKS = tuple(
    {
        "input": values((6, 1), 81 + k, 0.0, 1.0).astype(np.float32),
        "label": _drawn((6, 1), 85 + k, 2).astype(np.float32),
    }
    for k in range(3)
)
_SCORES = tuple({"input": values((2, 6, 4), 91 + k), "input_length": np.array([[6], [4]])} for k in range(2))
COUNTS: Mapping[str, CountCase] = {
    **{f"chunk_eval, {scheme}": _chunks(scheme, 11 + 20 * n) for n, scheme in enumerate(_KINDS)},
    "chunk_eval, excluded": _chunks("IOB", 11, (1,)),
    "crf_decoding": _path(_EMISSIONS),
    "crf_decoding, label": _path(_TAGGED),
    "ctc_greedy_decoder": CountCase(
        "ctc_greedy_decoder", _SCORES, arguments={"blank": 0, "padding_value": -1}, formula="ctc_greedy_decoder"
    ),
    "ctr_metric_bundle": CountCase("ctr_metric_bundle", _CLICKS, formula="ctr_metric_bundle"),
    "detection_map": _precision(),
    "detection_map, 11point": _precision(ap_version="11point"),
    "detection_map without difficult boxes": _precision(evaluate_difficult=False, overlap_threshold=0.75),
    "edit_distance": _distance(normalized=True),
    "edit_distance, whole": _distance(normalized=False),
    "edit_distance, ignored tokens": CountCase(
        "edit_distance",
        (_TEXTS,),
        _TEXT_LENGTHS,
        {"normalized": False, "ignored_tokens": [0]},
        formula="edit_distance",
    ),
    "mean_iou": CountCase(
        "mean_iou",
        tuple({"input": _drawn((12,), 101 + k, 4), "label": _drawn((12,), 103 + k, 3)} for k in range(2)),
        arguments={"num_classes": 5},
        formula="mean_iou",
    ),
}


# -- formulas --------------------------------------------------------------------------------------------------------


def ctc_greedy_decoder(case: CountCase, batches: Sequence[Batch]) -> list[Array]:
    """paddle/fluid/operators/ctc_align_op.h, of the classes that are largest; the padded form."""
    batch, blank = batches[-1], case.arguments["blank"]
    best = batch["input"].argmax(2)
    found = np.full(best.shape, case.arguments["padding_value"])
    numbers = []
    for row, (ids, steps) in enumerate(zip(best, batch["input_length"][:, 0], strict=True)):
        text = [int(v) for k, v in enumerate(ids[:steps]) if v != blank and (k == 0 or v != ids[k - 1])]
        found[row, : len(text)] = text
        numbers.append(len(text))
    return [found, np.array(numbers)]


def ctr_metric_bundle(case: CountCase, batches: Sequence[Batch]) -> list[Array]:
    """python/paddle/fluid/contrib/layers/metric_op.py: sums over all batches."""
    p, y = (np.concatenate([batch[name] for batch in batches]).astype(np.float64) for name in ("input", "label"))
    terms = [(p - y) ** 2, np.abs(p - y), p, 1 / (1 + np.exp(-p)), y, np.ones_like(p)]
    return [term.sum() for term in terms]


def edit_distance(case: CountCase, batches: Sequence[Batch]) -> list[Array]:
    """paddle/fluid/operators/edit_distance_op.h, behind sequence_erase_op.h."""
    batch, ends = batches[-1], {name: np.cumsum(sizes) for name, sizes in case.lengths.items()}
    ignored, distances = case.arguments["ignored_tokens"], []
    for k, sizes in enumerate(zip(*case.lengths.values(), strict=True)):
        found, wanted = (
            [int(v) for v in batch[name][ends[name][k] - size : ends[name][k], 0] if v not in ignored]
            for name, size in zip(case.lengths, sizes, strict=True)
        )
        row = list(range(len(wanted) + 1))
        for i, one in enumerate(found, 1):
            above, row = row, [i]
            for j, other in enumerate(wanted, 1):
                row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (one != other)))
        distances.append(float(row[-1]))
    return [np.array(distances), np.array([len(distances)])]


def mean_iou(case: CountCase, batches: Sequence[Batch]) -> list[Array]:
    """paddle/fluid/operators/mean_iou_op.h."""
    found, wanted = batches[-1]["input"], batches[-1]["label"]
    wrong, correct = np.zeros((2, case.arguments["num_classes"]))
    for one, other in zip(found, wanted, strict=True):
        if one == other:
            correct[one] += 1
        else:
            wrong[one] += 1
            wrong[other] += 1
    valid = wrong + correct > 0
    return [(correct / np.maximum(wrong + correct, 1)).sum() / valid.sum(), wrong, correct]


# -- fluid.metrics, fluid.average, fluid.evaluator -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectCase:
    """A metric outside of a Program: what it says after each of `updates`, tuples of arguments.

    `path`: under fluid. `peer`: a class of paddle.metric, whose arguments and arithmetic are the same; else `formula`
    gets all updates so far. `method`: that takes a batch in.
    """

    path: str
    updates: tuple[tuple[Any, ...], ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""
    formula: str = ""
    method: str = "update"


def _clicks(seed: int, size: int = 40) -> tuple[Array, Array]:
    return values((size, 1), seed, 0.0, 1.0).astype(np.float32), _drawn((size, 1), seed + 5, 2)


def _both(share: Array) -> Array:
    return np.hstack([1 - share, share])


_HALVES = (np.array([[0.5], [1.5], [0.25], [0.75], [1.0]], np.float32), np.array([[1], [0], [1], [1], [1]]))
_EDGES = (np.arange(4096, dtype=np.float32) / np.float32(4095)).reshape(-1, 1)
_EDGE_CLICKS = (values((4096, 1), 3, 0.0, 1.0) < np.linspace(0, 1, 4096).reshape(-1, 1)).astype(np.int64)
_SHARES = tuple(_clicks(111 + k) for k in range(3))
OBJECTS: Mapping[str, ObjectCase] = {
    "Accuracy": ObjectCase("metrics.Accuracy", ((0.5, 4), (0.75, 12), (np.array([0.25]), 8)), formula="mean"),
    "Auc": ObjectCase("metrics.Auc", tuple((_both(p), y) for p, y in _SHARES), {"name": "auc"}, "Auc"),
    "Auc, 7 thresholds": ObjectCase(
        "metrics.Auc", tuple((_both(p), y) for p, y in _SHARES), {"name": "auc", "num_thresholds": 7}, "Auc"
    ),
    "Auc at the edges of bins": ObjectCase("metrics.Auc", ((_both(_EDGES), _EDGE_CLICKS),), {"name": "auc"}, "Auc"),
    "ChunkEvaluator": ObjectCase("metrics.ChunkEvaluator", ((0, 3, 0), (10, 9, 8), (4, 5, 3)), formula="chunks"),
    "CompositeMetric": ObjectCase("metrics.CompositeMetric", _SHARES, formula="composite"),
    "EditDistance": ObjectCase(
        "metrics.EditDistance",
        ((np.array([[0.5], [0.0], [1.0]]), 3), (np.array([[0.0], [0.25]]), 2)),
        {"name": "distance"},
        formula="distances",
    ),
    "Precision": ObjectCase("metrics.Precision", _SHARES, peer="Precision"),
    "Precision of halves": ObjectCase("metrics.Precision", (_HALVES,), formula="precision"),
    "Recall": ObjectCase("metrics.Recall", _SHARES, peer="Recall"),
    "Recall of halves": ObjectCase("metrics.Recall", (_HALVES,), formula="recall"),
    "WeightedAverage": ObjectCase("average.WeightedAverage", ((0.5, 2), (2.0, 6)), formula="mean", method="add"),
    "WeightedAverage of arrays": ObjectCase(
        "average.WeightedAverage",
        ((np.array([0.5, 1.0]), 2), (np.array([1.5, -1.0]), 6)),
        formula="mean",
        method="add",
    ),
}
EVALUATED = ("ChunkEvaluator", "DetectionMAP", "EditDistance")
"""Of fluid.evaluator: over the batches of "chunk_eval, IOB", "detection_map" and "edit_distance"."""


def mean(updates: Sequence[tuple[Any, ...]]) -> Any:
    """fluid.metrics.Accuracy, fluid.average.WeightedAverage: the mean of values, weighed."""
    return sum(value * weight for value, weight in updates) / sum(weight for _, weight in updates)


def chunks(updates: Sequence[tuple[Any, ...]]) -> list[float]:
    """fluid.metrics.ChunkEvaluator."""
    found, wanted, correct = (float(sum(one[k] for one in updates)) for k in range(3))
    precision, recall = correct / found if found else 0.0, correct / wanted if wanted else 0.0
    return [precision, recall, 2 * precision * recall / (precision + recall) if correct else 0.0]


def distances(updates: Sequence[tuple[Any, ...]]) -> list[float]:
    """fluid.metrics.EditDistance."""
    number = sum(count for _, count in updates)
    wrong = number - sum(int((found == 0).sum()) for found, _ in updates)
    return [sum(float(found.sum()) for found, _ in updates) / number, wrong / number]


def _hits(updates: Sequence[tuple[Any, ...]]) -> tuple[Array, Array]:
    given = np.rint(np.concatenate([p for p, _ in updates])).astype(np.int32)
    return given == 1, np.concatenate([y for _, y in updates]) == 1


def precision(updates: Sequence[tuple[Any, ...]]) -> float:
    """fluid.metrics.Precision, whose rint puts halves to the even number; 2.6.2 rounds them up."""
    given, wanted = _hits(updates)
    return float((given & wanted).sum() / given.sum())


def recall(updates: Sequence[tuple[Any, ...]]) -> float:
    """fluid.metrics.Recall, as `precision`."""
    given, wanted = _hits(updates)
    return float((given & wanted).sum() / wanted.sum())


def composite(updates: Sequence[tuple[Any, ...]]) -> list[float]:
    """fluid.metrics.CompositeMetric of a Precision and a Recall."""
    return [precision(updates), recall(updates)]
