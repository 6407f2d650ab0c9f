"""Losses in Fluid's shapes, and metrics: one value a row is [n, 1]; a scalar is fetched as [1] a replica.

Counters of metrics are buffers: one set a replica, replica 0's are saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.layers.expected import expect_ids, expect_labels, expect_same_shape
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import recording_modes, wrap
from penstock.program.training.parameters import create_persistable

_TINY = 1e-20  # Fluid's TolerableValue: the logarithm of a probability that underflowed stays finite


def cross_entropy(input: Any, label: Any, soft_label: bool = False, ignore_index: int = -100) -> Any:
    """Return -log p[label] for each row.

    Shapes: input [n, classes] probabilities; label int64 [n, 1], or [n, classes] with soft_label; result [n, 1].
    """
    expect_labels("cross_entropy", input, label, soft=soft_label)
    with name_scope(default_main_program().unique("cross_entropy")):
        logs = torch.log(input.clamp_min(_TINY)) if soft_label else None
        if logs is not None:
            return -(label * logs).sum(-1, keepdim=True)
        picked = torch.gather(input, -1, label if ignore_index < 0 else label.clamp_min(0))
        loss = -torch.log(picked.clamp_min(_TINY))
        return loss if ignore_index < 0 else torch.where(label == ignore_index, torch.zeros_like(loss), loss)


def softmax_with_cross_entropy(logits: Any, label: Any, soft_label: bool = False, ignore_index: int = -100) -> Any:
    """Return the cross entropy of softmax(logits), computed from the logits. Shapes as `cross_entropy`."""
    expect_labels("softmax_with_cross_entropy", logits, label, soft=soft_label)
    with name_scope(default_main_program().unique("softmax_with_cross_entropy")):
        logs = F.log_softmax(logits, -1)
        if soft_label:
            return -(label * logs).sum(-1, keepdim=True)
        loss = -torch.gather(logs, -1, label if ignore_index < 0 else label.clamp_min(0))
        return loss if ignore_index < 0 else torch.where(label == ignore_index, torch.zeros_like(loss), loss)


def square_error_cost(input: Any, label: Any) -> Any:
    """Return (input - label)^2, elementwise."""
    expect_same_shape("square_error_cost", input, label)
    with name_scope(default_main_program().unique("square_error_cost")):
        difference = input - label
        return difference * difference


def log_loss(input: Any, label: Any, epsilon: float = 1e-4, name: str | None = None) -> Any:
    """Return -label log(input + epsilon) - (1 - label) log(1 - input + epsilon). Shapes: [n, 1], label a float."""
    with name_scope(name or default_main_program().unique("log_loss")):
        return -label * torch.log(input + epsilon) - (1.0 - label) * torch.log(1.0 - input + epsilon)


def sigmoid_cross_entropy_with_logits(
    x: Any, label: Any, ignore_index: int = -100, name: str | None = None, normalize: bool = False
) -> Any:
    """Return max(x, 0) - x label + log(1 + exp(-|x|)); zero where the label is `ignore_index`.

    `normalize`: divided by the number of labels that count (on this replica).
    """
    with name_scope(name or default_main_program().unique("sigmoid_cross_entropy_with_logits")):
        loss = F.relu(x) - x * label + torch.log1p(torch.exp(-torch.abs(x)))
        counts = (label != ignore_index).to(loss.dtype)
        loss = loss * counts
        return loss / counts.sum().clamp_min(1e-5) if normalize else loss


def huber_loss(input: Any, label: Any, delta: float) -> Any:
    """Return r^2 / 2 where |r| <= delta, else delta (|r| - delta / 2), of r = label - input."""
    with name_scope(default_main_program().unique("huber_loss")):
        return F.huber_loss(input, label, reduction="none", delta=delta)


def smooth_l1(x: Any, y: Any, inside_weight: Any = None, outside_weight: Any = None, sigma: float | None = None) -> Any:
    """Return the smooth L1 distance of each row [n, 1]: of d = inside (x - y), (sigma d)^2 / 2 where |d| < 1 / sigma^2,
    else |d| - 1 / (2 sigma^2), times `outside_weight`."""
    with name_scope(default_main_program().unique("smooth_l1")):
        difference = x - y if inside_weight is None else (x - y) * inside_weight
        # torch divides the quadratic part by beta, Fluid multiplies it with sigma^2: the same for beta = 1 / sigma^2.
        beta = 1.0 / float(sigma or 1.0) ** 2
        loss = F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none", beta=beta)
        loss = loss if outside_weight is None else loss * outside_weight
        return loss.flatten(1).sum(1, keepdim=True)


def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """Return the share of rows whose label is among the k largest. Shapes: input [n, classes], label [n, 1]."""
    if correct is not None or total is not None:
        raise ProgramError(f"{user_line()}: accuracy(correct=, total=) is not supported; fetch the result instead")
    expect_ids("accuracy", label)
    recording = recording_of(default_main_program())
    with name_scope(default_main_program().unique("accuracy")), torch.no_grad(), recording_modes(recording):
        indices = input.fake.detach().topk(k, -1).indices
        return wrap(recording, torch.ops.penstock.accuracy(indices, label.fake)[0])


def auc(
    input: Any,
    label: Any,
    curve: str = "ROC",
    num_thresholds: int = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Any, Any, list[Any]]:
    """Return (auc over all rows so far, auc of this batch, their counters).

    Shapes: input [n, 2] probabilities (column 1 counts) or [n, 1]; label int64 [n, 1]; result a scalar.
    The counters stay until their variables are set to zero. Source: fluid.layers.auc.
    """
    if curve != "ROC":
        raise ProgramError(f"{user_line()}: auc(curve={curve!r}): only 'ROC' is supported")
    prefix = default_main_program().unique("auc")
    zero = Constant(0)
    states = [create_persistable(f"{prefix}.{s}", [num_thresholds + 1], "int64", zero) for s in ("pos", "neg")]
    recording = recording_of(default_main_program())
    with name_scope(prefix), torch.no_grad(), recording_modes(recording):
        predict = input.fake.detach()
        overall = torch.ops.penstock.auc(predict, label.fake, states[0].fake, states[1].fake)
        fresh = [torch.zeros(num_thresholds + 1, dtype=torch.int64) for _ in range(2)]
        batch = torch.ops.penstock.auc(predict, label.fake, *fresh)
        return wrap(recording, overall), wrap(recording, batch), states
