"""`fluid.metrics` and `fluid.average`, against scikit-learn and sums by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as oracle

import penstock as fluid
from penstock.errors import SpecError

RANDOM = np.random.default_rng(5)
PREDICTED, LABELS = RANDOM.random((40, 1)), RANDOM.integers(0, 2, (40, 1))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(PREDICTED[i : i + 10], LABELS[i : i + 10]) for i in range(0, 40, 10)]


def test_counting_metrics_equal_scikit_learn() -> None:
    both = fluid.metrics.CompositeMetric()
    both.add_metric(fluid.metrics.Precision())
    both.add_metric(fluid.metrics.Recall("recall"))
    for predicted, labels in batches():
        both.update(predicted, labels)
    given = np.rint(PREDICTED)
    assert both.eval() == pytest.approx([oracle.precision_score(LABELS, given), oracle.recall_score(LABELS, given)])
    both.reset()
    assert both.eval() == [0.0, 0.0]
    with pytest.raises(SpecError, match="add_metric is given a str"):
        both.add_metric("auc")


@pytest.mark.parametrize("columns", [1, 2])
def test_auc_equals_scikit_learn(columns: int) -> None:
    auc = fluid.metrics.Auc("auc")
    assert auc.eval() == 0.0
    for predicted, labels in batches():
        auc.update(np.hstack([1 - predicted, predicted])[:, -columns:], labels)
    assert auc.eval() == pytest.approx(oracle.roc_auc_score(LABELS, PREDICTED), abs=1e-3)
    auc.reset()
    assert auc.eval() == 0.0


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("Auc", [[0.5], [1.5]], "from 0.5 to 1.5; expected probabilities"),
        ("Auc", [[-0.1], [0.5]], "from -0.1 to 0.5; expected probabilities"),
        ("Auc", [[-1e-8], [1.0005]], "from -1e-08 to 1.0005; expected probabilities"),
        ("Auc", [[0.5], [np.nan]], "1 of 2 predictions are NaN"),
        ("Precision", [[0.5], [np.nan]], "1 of 2 predictions are NaN"),
        ("Recall", [[0.5]], r"shapes \(1, 1\) and \(2, 1\)"),
        ("Auc", [[0.5]], r"shapes \(1,\) and \(2, 1\)"),
    ],
)
def test_what_is_no_prediction_is_an_error_and_is_not_counted(kind: str, given: list[list[float]], words: str) -> None:
    metric = getattr(fluid.metrics, kind)()
    with pytest.raises(SpecError, match=words):
        metric.update(np.array(given), np.array([[0], [1]]))
    assert metric.eval() == 0.0 and not any(np.any(count) for count in metric.get_config()["states"].values())


def test_accuracy_is_weighed_by_rows() -> None:
    accuracy = fluid.metrics.Accuracy()
    accuracy.update(value=np.array([0.5], "float32"), weight=2)
    accuracy.update(value=1.0, weight=6)
    assert accuracy.eval() == pytest.approx(0.875)
    assert accuracy.get_config() == {"name": "Accuracy", "states": {"value": 7.0, "weight": 8.0}}
    accuracy.reset()
    with pytest.raises(SpecError, match="before update"):
        accuracy.eval()
    with pytest.raises(SpecError, match="weight is -1"):
        accuracy.update(1.0, -1)


def test_chunks_and_edit_distances_are_summed() -> None:
    chunks = fluid.metrics.ChunkEvaluator()
    assert chunks.eval() == (0.0, 0.0, 0.0)
    chunks.update(np.array([8]), np.array([10]), np.array([4]))
    chunks.update(2, 0, 1)
    assert chunks.eval() == pytest.approx((0.5, 0.5, 0.5))
    distances = fluid.metrics.EditDistance("edits")
    distances.update(np.array([[0.0], [3.0], [0.0]]), np.array([3]))
    distances.update(np.array([[1.0]]), 1)
    assert distances.eval() == (1.0, 0.5)


def test_a_weighted_average_is_a_mean() -> None:
    average = fluid.average.WeightedAverage()
    with pytest.raises(SpecError, match="nothing to average"):
        average.eval()
    average.add(np.array([1.0, 3.0]), 1)
    average.add(np.array([5.0, 5.0]), np.array([3.0]))
    np.testing.assert_allclose(average.eval(), [4.0, 4.5])
    with pytest.raises(SpecError, match="expected numbers, one weight"):
        average.add("loss", 1)


def test_labels_of_metrics_may_be_int32() -> None:
    main, startup = fluid.Program(seed=1), fluid.Program(seed=1)
    with fluid.program_guard(main, startup):
        scores = fluid.layers.data("scores", [2])
        labels = [fluid.layers.data(f"labels_{kind}", [1], dtype=kind) for kind in ("int32", "int64")]
        found = [
            one
            for label in labels
            for one in (fluid.layers.accuracy(scores, label), fluid.layers.auc(scores, label)[0])
        ]
    draw = np.random.default_rng(0)
    values, given = draw.random((9, 2)).astype("float32"), draw.integers(0, 2, (9, 1))
    feed = {"scores": values, "labels_int32": given.astype("int32"), "labels_int64": given}
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(startup)
    few, many = np.split(np.ravel(executor.run(main, feed, found)), 2)
    np.testing.assert_array_equal(few, many)
    assert 0 < few[0] < 1
