"""Metrics over the batches of a pass, computed from what runs have fetched: `fluid.metrics`, `fluid.average`.

Each takes arrays (or what numpy makes arrays of) and keeps sums between `reset` and `eval`; but for DetectionMAP, which
records operators. Source: fluid.metrics and fluid.average (Fluid 1.8), whose formulas and bins these are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import SpecError
from penstock.program.layers.detections import DetectionMAP

__all__ = [
    "Accuracy", "Auc", "ChunkEvaluator", "CompositeMetric", "DetectionMAP", "EditDistance", "MetricBase", "Precision",
    "Recall", "WeightedAverage",
]  # fmt: skip

Array = npt.ArrayLike


class MetricBase:
    """Base of metrics: public attributes are its state, which `reset` sets to zero."""

    def __init__(self, name: str | None = None) -> None:
        self._name = type(self).__name__ if name is None else name

    def __str__(self) -> str:
        return self._name

    def reset(self) -> None:
        """Forget what was taken in: numbers become 0, arrays zeros, anything else None."""
        for key, value in vars(self).items():
            if key.startswith("_"):
                continue
            kept: Any = None
            if isinstance(value, (int, float)):
                kept = type(value)(0)
            elif isinstance(value, np.ndarray | np.generic):
                kept = np.zeros_like(value)
            setattr(self, key, kept)

    def get_config(self) -> dict[str, Any]:
        """Return the name and the state."""
        return {"name": self._name, "states": {k: v for k, v in vars(self).items() if not k.startswith("_")}}

    def update(self, preds: Array, labels: Array) -> None:
        """Take in one batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no update()")

    def eval(self) -> Any:
        """Return the metric of all batches since `reset`."""
        raise NotImplementedError(f"{type(self).__name__} defines no eval()")


class CompositeMetric(MetricBase):
    """Several metrics of one prediction."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._metrics: list[MetricBase] = []

    def add_metric(self, metric: MetricBase) -> None:
        """Add a metric. Raises SpecError for anything else."""
        if not isinstance(metric, MetricBase):
            raise SpecError(f"add_metric is given a {type(metric).__name__}; expected a fluid.metrics.MetricBase")
        self._metrics.append(metric)

    def reset(self) -> None:
        """Reset all of them."""
        for metric in self._metrics:
            metric.reset()

    def update(self, preds: Array, labels: Array) -> None:
        """Hand a batch to all of them."""
        for metric in self._metrics:
            metric.update(preds, labels)

    def eval(self) -> list[Any]:
        """Return what each gives, in order."""
        return [metric.eval() for metric in self._metrics]


def _checked(metric: MetricBase, preds: Array, labels: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the predictions and labels [n]. Raises SpecError for NaN and for unequal numbers of them."""
    given, wanted = np.asarray(preds, np.float64).reshape(-1), np.asarray(labels).reshape(-1)
    if given.shape != wanted.shape:
        sizes = f"shapes {np.shape(preds)} and {np.shape(labels)}"
        raise SpecError(f"{metric}.update is given predictions and labels of {sizes}; expected [n, 1] each")
    if np.isnan(given).any():
        raise SpecError(f"{metric}.update: {int(np.isnan(given).sum())} of {given.size} predictions are NaN")
    return given, wanted.astype("int64")


def _classes(metric: MetricBase, preds: Array, labels: Array) -> tuple[np.ndarray, np.ndarray]:
    given, wanted = _checked(metric, preds, labels)
    return np.rint(given), wanted


class Precision(MetricBase):
    """Share of the rows predicted as 1 (a probability rounded) whose label is 1. Shapes: [n, 1] each."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.tp = self.fp = 0

    def update(self, preds: Array, labels: Array) -> None:
        """Take in one batch."""
        given, wanted = _classes(self, preds, labels)
        self.tp += int(((given == 1) & (wanted == 1)).sum())
        self.fp += int(((given == 1) & (wanted != 1)).sum())

    def eval(self) -> float:
        """Return the precision; 0 if nothing was predicted as 1."""
        return self.tp / (self.tp + self.fp) if self.tp + self.fp else 0.0


class Recall(MetricBase):
    """Share of the rows labelled 1 that were predicted as 1. Shapes: [n, 1] each."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.tp = self.fn = 0

    def update(self, preds: Array, labels: Array) -> None:
        """Take in one batch."""
        given, wanted = _classes(self, preds, labels)
        self.tp += int(((given == 1) & (wanted == 1)).sum())
        self.fn += int(((given != 1) & (wanted == 1)).sum())

    def eval(self) -> float:
        """Return the recall; 0 if nothing is labelled 1."""
        return self.tp / (self.tp + self.fn) if self.tp + self.fn else 0.0


class Accuracy(MetricBase):
    """Mean of the batches' accuracies, weighed by their rows."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.value = self.weight = 0.0

    def update(self, value: Array, weight: Array) -> None:
        """Take in the accuracy of a batch, a number or [1], and its rows. Raises SpecError for a negative weight."""
        amount = float(np.asarray(weight).mean())
        if amount < 0:
            raise SpecError(f"Accuracy.update: weight is {amount}; expected the number of rows, at least 0")
        self.value += float(np.asarray(value).mean()) * amount
        self.weight += amount

    def eval(self) -> float:
        """Return the mean. Raises SpecError before the first batch."""
        if self.weight == 0:
            raise SpecError("Accuracy.eval before update: there is no batch yet")
        return self.value / self.weight


class ChunkEvaluator(MetricBase):
    """Precision, recall and F1 of chunks, from the counts that a chunk evaluation of each batch gives."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.num_infer_chunks = self.num_label_chunks = self.num_correct_chunks = 0

    def update(self, num_infer_chunks: Array, num_label_chunks: Array, num_correct_chunks: Array) -> None:  # type: ignore[override]  # as Fluid
        """Take in the counts of a batch."""
        self.num_infer_chunks += int(np.asarray(num_infer_chunks).sum())
        self.num_label_chunks += int(np.asarray(num_label_chunks).sum())
        self.num_correct_chunks += int(np.asarray(num_correct_chunks).sum())

    def eval(self) -> tuple[float, float, float]:
        """Return (precision, recall, F1)."""
        correct = self.num_correct_chunks
        precision = correct / self.num_infer_chunks if self.num_infer_chunks else 0.0
        recall = correct / self.num_label_chunks if self.num_label_chunks else 0.0
        return precision, recall, 2 * precision * recall / (precision + recall) if correct else 0.0


class EditDistance(MetricBase):
    """Mean edit distance of sequences, and the share of them that differ."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.total_distance, self.seq_num, self.instance_error = 0.0, 0, 0

    def update(self, distances: Array, seq_num: Array) -> None:
        """Take in the distances of a batch [n, 1] and the number of its sequences."""
        found, number = np.asarray(distances), int(np.asarray(seq_num).sum())
        self.total_distance += float(found.sum())
        self.seq_num += number
        self.instance_error += number - int((found == 0).sum())

    def eval(self) -> tuple[float, float]:
        """Return (mean distance, share of sequences that differ). Raises SpecError before the first batch."""
        if self.seq_num == 0:
            raise SpecError("EditDistance.eval before update: there is no sequence yet")
        return self.total_distance / self.seq_num, self.instance_error / self.seq_num


class Auc(MetricBase):
    """Area under the ROC curve, over `num_thresholds` + 1 bins of the probability, as `layers.auc`."""

    def __init__(self, name: str | None = None, curve: str = "ROC", num_thresholds: int = 4095) -> None:
        super().__init__(name)
        if curve != "ROC":
            raise SpecError(f"Auc: curve is {curve!r}; only 'ROC' is supported")
        self._num_thresholds = num_thresholds
        self.positives = np.zeros(num_thresholds + 1, np.int64)
        self.negatives = np.zeros(num_thresholds + 1, np.int64)

    def update(self, preds: Array, labels: Array) -> None:
        """Take in one batch. Shapes: preds [n, 2] (column 1 counts) or [n, 1]; labels [n, 1].

        Raises SpecError for what is no probability.
        """
        columns = np.asarray(preds)
        probabilities, wanted = _checked(self, columns[:, -1] if columns.ndim > 1 else columns, labels)
        bins = (probabilities * self._num_thresholds).astype(np.int64)
        if bins.size and not (bins.min() >= 0 and bins.max() <= self._num_thresholds):
            low, high = float(probabilities.min()), float(probabilities.max())
            raise SpecError(f"{self}.update: predictions are from {low} to {high}; expected probabilities, 0 to 1")
        np.add.at(self.positives, bins[wanted != 0], 1)
        np.add.at(self.negatives, bins[wanted == 0], 1)

    def eval(self) -> float:
        """Return the area; 0 unless there are rows of both classes."""
        above = np.cumsum(self.positives[::-1]).astype(np.float64)
        beside = np.cumsum(self.negatives[::-1]).astype(np.float64)
        if not above[-1] or not beside[-1]:
            return 0.0
        heights = above + np.concatenate([[0.0], above[:-1]])
        area = float((np.diff(beside, prepend=0.0) * heights).sum() / 2.0)
        return area / float(above[-1]) / float(beside[-1])


class WeightedAverage:
    """Mean of values with weights: `fluid.average.WeightedAverage`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all values."""
        self._sum: Any = None
        self._weight = 0.0

    def add(self, value: Array, weight: Array) -> None:
        """Take in a number or an array, and its weight. Raises SpecError for what is none."""
        number, amount = np.asarray(value), np.asarray(weight)
        if number.dtype.kind not in "iufb" or amount.dtype.kind not in "iufb" or amount.size != 1:
            raise SpecError(f"WeightedAverage.add is given {value!r} and {weight!r}; expected numbers, one weight")
        term = number * float(amount.reshape(()))
        self._sum = term if self._sum is None else self._sum + term
        self._weight += float(amount.reshape(()))

    def eval(self) -> Any:
        """Return the mean. Raises SpecError without a weight."""
        if self._sum is None or self._weight == 0:
            raise SpecError("WeightedAverage.eval: there is nothing to average; call add() first")
        return self._sum / self._weight
