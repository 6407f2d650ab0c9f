"""Kinds of losses and metrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from penstock.program import layers
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind, layer
from penstock.program.record.context import default_main_program
from penstock.program.record.opening import recording_of
from penstock.program.record.variable import recording_modes, wrap


def _softmax_entropy(call: Call) -> Any:
    loss, softmax = layers.softmax_with_cross_entropy(
        call.one("Logits"), call.one("Label"), call["soft_label"], call["ignore_index"], return_softmax=True,
        axis=call["axis"],
    )  # fmt: skip
    return softmax, loss


def _sigmoid_entropy(call: Call) -> Any:
    return layers.sigmoid_cross_entropy_with_logits(
        call.one("X"), call.one("Label"), call["ignore_index"], normalize=call["normalize"]
    )


def _huber(call: Call) -> Any:
    x, y = call.one("X"), call.one("Y")
    return layers.huber_loss(x, y, call["delta"]), y - x


def _smooth(call: Call) -> Any:
    weights = call.optional("InsideWeight"), call.optional("OutsideWeight")
    return layers.smooth_l1(call.one("X"), call.one("Y"), *weights, call["sigma"])


def _margin(call: Call) -> Any:
    return layers.margin_rank_loss(call.one("Label"), call.one("X1"), call.one("X2"), call["margin"])


def _hinge(call: Call) -> Any:
    signs = call.one("Labels") * 2.0 - 1.0
    return F.relu(1.0 - signs * call.one("Logits"))


def _accuracy(call: Call) -> Any:
    recording = recording_of(default_main_program())
    indices, labels = call.one("Indices"), call.one("Label")
    with torch.no_grad(), recording_modes(recording):
        share, *counts = torch.ops.penstock.accuracy(indices.fake, labels.fake.long())
        numbers = [wrap(recording, one.reshape(1).to(torch.int32)) for one in counts]
        return wrap(recording, share.reshape(1)), *numbers


def _auc(call: Call) -> Any:
    if call["curve"] != "ROC" or call["slide_steps"] != 0:
        raise call.refuse(
            f"has curve={call['curve']!r}, slide_steps={call['slide_steps']} (call layers.auc for the last batches)"
        )
    recording = recording_of(default_main_program())
    counters = [call.one(slot) for slot in ("StatPos", "StatNeg")]
    with torch.no_grad(), recording_modes(recording):
        flat = [one.fake.reshape(-1) for one in counters]
        labels = call.one("Label").fake.long()
        area = torch.ops.penstock.auc(call.one("Predict").fake.detach(), labels, *flat)
        return wrap(recording, area.reshape(1)), *counters


LOSSES: dict[str, Kind] = {
    "cross_entropy": layer(layers.cross_entropy, "X Label", "Y", {"soft_label": False, "ignore_index": -100}),
    "cross_entropy2": layer(layers.cross_entropy, "X Label", "Y XShape- MatchX-", {"ignore_index": -100}),
    "softmax_with_cross_entropy": Kind(_softmax_entropy, "Logits Label", "Softmax Loss", {
        "soft_label": False, "ignore_index": -100, "axis": -1,
    }),
    "sigmoid_cross_entropy_with_logits": Kind(_sigmoid_entropy, "X Label", attrs={
        "ignore_index": -100, "normalize": False,
    }),
    "log_loss": layer(layers.log_loss, "Predicted Labels", "Loss", {"epsilon": REQUIRED}),
    "huber_loss": Kind(_huber, "X Y", "Out Residual", {"delta": REQUIRED}),
    "smooth_l1_loss": Kind(_smooth, "X Y InsideWeight? OutsideWeight?", "Out Diff-", {"sigma": 1.0}),
    "kldiv_loss": layer(layers.kldiv_loss, "X Target", "Loss", {"reduction": "mean"}),
    "rank_loss": layer(layers.rank_loss, "Label Left Right"),
    "margin_rank_loss": Kind(_margin, "X1 X2 Label", "Out Activated-", {"margin": 0.0}),
    "bpr_loss": layer(layers.bpr_loss, "X Label", "Y"),
    "hinge_loss": Kind(_hinge, "Logits Labels", "Loss"),
    "teacher_student_sigmoid_loss": layer(layers.teacher_student_sigmoid_loss, "X Label", "Y", {
        "soft_max_up_bound": 15.0, "soft_max_lower_bound": -15.0,
    }),
    "mean_iou": layer(layers.mean_iou, "Predictions Labels", "OutMeanIou OutWrong OutCorrect", {
        "num_classes": REQUIRED,
    }),
    "accuracy": Kind(_accuracy, "Out Indices Label", "Accuracy Correct Total"),
    "auc": Kind(_auc, "Predict Label StatPos StatNeg", "AUC StatPosOut StatNegOut", {
        "curve": "ROC", "num_thresholds": 8191, "slide_steps": 1,
    }),
}  # fmt: skip
