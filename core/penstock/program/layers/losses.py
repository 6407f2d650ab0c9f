"""Losses in Fluid's shapes, and metrics: one value a row is [n, 1]; a scalar is fetched as [1] a replica.

Counters of metrics are buffers: one set a replica, replica 0's are saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Xavier
from penstock.program.ir import Ref
from penstock.program.layers.expected import (
    expect_broadcast,
    expect_ids,
    expect_known,
    expect_labels,
    expect_same_shape,
)
from penstock.program.layers.results import result
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared import written
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized
from penstock.program.record.variable import Variable, dtype_named, recording_modes, wrap
from penstock.program.training.parameters import ParamAttr, create_persistable

_NOT_IGNORED = -100  # Fluid's default: no label has it
_INFINITE = 1e20  # what Fluid's TolerableValue puts in the place of an infinite logarithm
_LEAST_LOG_OF_SOFTMAX = -64.0  # of Fluid's, which cuts its exponents there
_RESHAPES = {f"aten.{name}" for name in ("view", "_unsafe_view", "squeeze", "unsqueeze")}


@reads_unsized
def cross_entropy(input: Any, label: Any, soft_label: bool = False, ignore_index: int = _NOT_IGNORED) -> Any:
    """Return -log p[label] for each row: 1e20 where p is 0, or at most 64 if p is of a softmax.

    The gradient is -1 / p, and 0 where that is not finite.

    Shapes: input [n, classes] probabilities; label int64 [n, 1], or [n, classes] with soft_label; result [n, 1]. Label
    and result may lack the last 1.
    """
    if not soft_label and isinstance(label, Variable) and label.ndim == input.ndim - 1:
        return cross_entropy(input, label.unsqueeze(-1), ignore_index=ignore_index).squeeze(-1)
    expect_labels("cross_entropy", input, label, soft=soft_label)
    with name_scope(default_main_program().unique("cross_entropy")):
        log = _log_of_softmax if _is_of_softmax(input) else _finite_log
        if soft_label:
            return -(label * log(input)).sum(-1, keepdim=True)
        loss = -log(torch.gather(input, -1, _indices(label, ignore_index)))
        return result(_counted(loss, label, ignore_index), default_main_program().unique("cross_entropy2"), 0)


def _is_of_softmax(p: Any) -> bool:
    """Whether a softmax made p, perhaps reshaped since: its least value is not 0 in Fluid, and may be 0 here."""
    makers = {name: op for op in default_main_program().operators for name in op.output_names()}
    made = makers.get(getattr(p, "name", ""))
    while made is not None and made.type.rpartition(".")[0] in _RESHAPES and isinstance(made.args[0], Ref):
        made = makers.get(made.args[0].name)
    return made is not None and made.type.startswith("aten._softmax.")


def _log_of_softmax(p: Any) -> Any:
    """log p, at least -64; the gradient is cut nowhere above where `_near_zero` begins."""
    near = _near_zero(p)
    logs = p.masked_fill(near, 1.0).log().masked_fill(near, _LEAST_LOG_OF_SOFTMAX)
    return logs + (logs.clamp_min(_LEAST_LOG_OF_SOFTMAX) - logs).detach()


def _finite_log(p: Any) -> Any:
    """log p, with the largest numbers where it is infinite: at most `_INFINITE`."""
    near, bound = _near_zero(p), min(_INFINITE, torch.finfo(p.dtype).max)
    return torch.where(near, p.detach().log(), p.masked_fill(near, 1.0).log()).clamp(-bound, bound)


def _near_zero(p: Any) -> Any:
    """Where 1 / p is not finite: a gradient there would end a training, so it is 0."""
    return p.abs() < 1 / torch.finfo(p.dtype).max


def _indices(label: Any, ignore_index: int) -> Any:
    """The labels, with a class that exists in place of `ignore_index`."""
    return label if ignore_index == _NOT_IGNORED else torch.where(label == ignore_index, torch.zeros_like(label), label)


def _counted(loss: Any, label: Any, ignore_index: int) -> Any:
    """The losses, zero where the label is `ignore_index`."""
    return loss if ignore_index == _NOT_IGNORED else torch.where(label == ignore_index, torch.zeros_like(loss), loss)


@reads_unsized
def softmax_with_cross_entropy(
    logits: Any,
    label: Any,
    soft_label: bool = False,
    ignore_index: int = _NOT_IGNORED,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """Return the cross entropy of softmax(logits) along `axis`, or with `return_softmax` the pair (loss, softmax).

    Shapes: logits with the classes along `axis`; label int64 with 1 there, or with soft_label the logits' shape; the
    loss has 1 there. It is computed from the logits whatever `numeric_stable_mode` says.
    """
    expect_labels("softmax_with_cross_entropy", logits, label, soft=soft_label, axis=axis)
    prefix = default_main_program().unique("softmax_with_cross_entropy")
    with name_scope(prefix):
        logs = F.log_softmax(logits, axis)
        if soft_label:
            loss = -(label * logs).sum(axis, keepdim=True)
        else:
            loss = _counted(-torch.gather(logs, axis, _indices(label, ignore_index)), label, ignore_index)
        loss = result(loss, prefix, 1)
        return (loss, result(logs.exp(), prefix, 0)) if return_softmax else loss


def square_error_cost(input: Any, label: Any) -> Any:
    """Return (input - label)^2, elementwise. The label may have 1 where the input is wider."""
    expect_broadcast("square_error_cost", input, label)
    prefix = default_main_program().unique("square_error_cost")
    with name_scope(prefix):
        difference = result(input - label, prefix, 0)
        return result(difference * difference, prefix, 1)


def log_loss(input: Any, label: Any, epsilon: float = 1e-4, name: str | None = None) -> Any:
    """Return -label log(input + epsilon) - (1 - label) log(1 - input + epsilon). Shapes: [n, 1], label a float."""
    with name_scope(name or default_main_program().unique("log_loss")):
        return -label * torch.log(input + epsilon) - (1.0 - label) * torch.log(1.0 - input + epsilon)


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)), with the gradient sigmoid(x) everywhere.

    max(x, 0) + log(1 + exp(-|x|)), which Fluid's kernels compute, has the gradient 0 at 0 if torch derives it, and
    `F.softplus` is x above 20.
    """
    return -F.logsigmoid(-x)


def sigmoid_cross_entropy_with_logits(
    x: Any, label: Any, ignore_index: int = -100, name: str | None = None, normalize: bool = False
) -> Any:
    """Return max(x, 0) - x label + log(1 + exp(-|x|)); zero where the label is `ignore_index`.

    `normalize`: divided by the number of labels that count (on this replica).
    """
    with name_scope(name or default_main_program().unique("sigmoid_cross_entropy_with_logits")):
        loss = softplus(x) - x * label
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


def mse_loss(input: Any, label: Any) -> Any:
    """Return the mean of (input - label)^2."""
    expect_same_shape("mse_loss", input, label)
    with name_scope(default_main_program().unique("mse_loss")):
        return F.mse_loss(input, label)


def kldiv_loss(x: Any, target: Any, reduction: str = "mean", name: str | None = None) -> Any:
    """Return target (log target - x), 0 where target is not positive. `reduction`: none, mean, batchmean or sum."""
    with name_scope(name or default_main_program().unique("kldiv_loss")):
        loss = F.kl_div(x, target, reduction="none")
        if reduction == "none":
            return loss
        if reduction not in ("mean", "batchmean", "sum"):
            raise ProgramError(f"{user_line()}: kldiv_loss: reduction is {reduction!r}")
        return loss.mean() if reduction == "mean" else loss.sum() / (x.shape[0] if reduction == "batchmean" else 1)


def rank_loss(label: Any, left: Any, right: Any, name: str | None = None) -> Any:
    """Return log(1 + exp(left - right)) - label (left - right). Shapes: [n, 1]."""
    with name_scope(name or default_main_program().unique("rank_loss")):
        difference = left - right
        return softplus(difference) - label * difference


def margin_rank_loss(label: Any, left: Any, right: Any, margin: float = 0.1, name: str | None = None) -> Any:
    """Return max(0, margin - label (left - right)). Shapes: [n, 1]; label 1 or -1."""
    with name_scope(name or default_main_program().unique("margin_rank_loss")):
        return F.relu(margin - label * (left - right))


def bpr_loss(input: Any, label: Any, name: str | None = None) -> Any:
    """Return the mean of -log(sigmoid(input[label] - input[j])) over the other classes j.

    Shapes: input [n, classes] scores; label int64 [n, 1]; result [n, 1].
    """
    expect_labels("bpr_loss", input, label, soft=False)
    with name_scope(name or default_main_program().unique("bpr_loss")):
        difference = torch.gather(input, -1, label) - input
        losses = -F.logsigmoid(difference)
        # Of the class itself the difference is 0, so its loss is log 2.
        return (losses.sum(-1, keepdim=True) - math.log(2.0)) / (input.shape[-1] - 1)


def dice_loss(input: Any, label: Any, epsilon: float = 1e-5) -> Any:
    """Return the mean over samples of 1 - 2 |input label| / (|input| + |label| + epsilon).

    Shapes: input [n, .., classes] probabilities; label [n, .., 1], whole numbers.
    """
    with name_scope(default_main_program().unique("dice_loss")):
        classes = F.one_hot(label.squeeze(-1).to(torch.int64), input.shape[-1]).to(input.dtype)
        dims = list(range(1, input.ndim))
        inside = (input * classes).sum(dims)
        return (1.0 - inside * 2.0 / (input.sum(dims) + classes.sum(dims) + epsilon)).mean()


def npair_loss(anchor: Any, positive: Any, labels: Any, l2_reg: float = 0.002) -> Any:
    """Return the N-pair loss of two sets of embeddings [n, d] with labels [n] or [n, 1]: the softmax cross entropy of
    anchor positive^T against equal labels, and l2_reg / 4 of the mean square norms."""
    with name_scope(default_main_program().unique("npair_loss")):
        column = labels.reshape([-1, 1])
        same = (column == column.t()).to(anchor.dtype)
        targets = same / same.sum(1, keepdim=True)
        norms = (anchor * anchor).sum(1).mean() + (positive * positive).sum(1).mean()
        logs = F.log_softmax(torch.matmul(anchor, positive.t()), -1)
        # As Fluid has it: the entropy of each row is weighed by the row's targets again, and the columns are averaged.
        entropy = -(targets * logs).sum(1, keepdim=True)
        return norms * 0.25 * l2_reg + (targets * entropy).sum(0).mean()


def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """Return the share of rows whose label is among the k largest. Shapes: input [n, classes], label [n, 1].

    `correct`, `total`: integer variables that the numbers of these rows and of all rows are written to.
    """
    expect_ids("accuracy", label)
    recording = recording_of(default_main_program())
    with name_scope(default_main_program().unique("accuracy")), torch.no_grad(), recording_modes(recording):
        indices = input.fake.detach().topk(k, -1).indices
        found = torch.ops.penstock.accuracy(indices, label.fake.long())
        counts = [wrap(recording, count.reshape(1)) for count in found[1:]]
        share = wrap(recording, found[0])
    for out, count in zip((correct, total), counts, strict=True):
        if out is not None:
            written(out, count.to(dtype_named(out.desc.dtype)))
    return share


def auc(
    input: Any,
    label: Any,
    curve: str = "ROC",
    num_thresholds: int = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Any, Any, list[Any]]:
    """Return (auc over all rows so far, auc of the last `slide_steps` batches, their counters).

    Shapes: input [n, 2] probabilities (column 1 counts) or [n, 1]; label int32 or int64 [n, 1]; result a scalar.
    `slide_steps`: 0 stands for all batches.
    The counters stay until their variables are set to zero. Source: fluid.layers.auc.
    """
    if curve != "ROC":
        raise ProgramError(f"{user_line()}: auc(curve={curve!r}): only 'ROC' is supported")
    if slide_steps < 0:
        raise ProgramError(
            f"{user_line()}: auc(slide_steps={slide_steps}): expected the number of batches, or 0 for all"
        )
    prefix = default_main_program().unique("auc")
    zero, size = Constant(0), num_thresholds + 1
    states = [create_persistable(f"{prefix}.{s}", [size], "int64", zero) for s in ("pos", "neg")]
    older = [
        create_persistable(f"{prefix}.older_{s}", [slide_steps - 1, size], "int64", zero)
        for s in ("pos", "neg")
        if slide_steps > 1
    ]
    recording = recording_of(default_main_program())
    with name_scope(prefix), torch.no_grad(), recording_modes(recording):
        predict = input.fake.detach()
        labels = label.fake.long()
        overall = torch.ops.penstock.auc(predict, labels, states[0].fake, states[1].fake)
        batch = overall if slide_steps == 0 else _auc_of_window(predict, labels, [o.fake for o in older], size)
        return wrap(recording, overall), wrap(recording, batch), [*states, *older]


def _auc_of_window(predict: Any, label: Any, older: list[Any], size: int) -> Any:
    """The auc of this batch and those in `older` ([n, size] each, the latest last), which it joins."""
    counts = [o.sum(0) for o in older] or [torch.zeros(size, dtype=torch.int64) for _ in range(2)]
    found = torch.ops.penstock.auc(predict, label, *counts)
    for kept, count in zip(older, counts, strict=False):
        kept.copy_(torch.cat([kept[1:], (count - kept.sum(0)).unsqueeze(0)]))
    return found


def teacher_student_sigmoid_loss(
    input: Any, label: Any, soft_max_up_bound: float = 15.0, soft_max_lower_bound: float = -15.0
) -> Any:
    """Return the loss of clicks, and of a teacher's scores where the label has one.

    Shapes: input x and label floating [n, 1]; result [n, 1]. With s(x) = log(1 + exp(x)): label -2, no click and no
    score: s(x); -1, a click alone: s(x) - x; q of [0, 1), no click: 2 s(x) - x q; 1 + q, a click: 2 s(x) - x (1 + q).
    There is no gradient where x is not between the bounds.
    """
    expect_same_shape("teacher_student_sigmoid_loss", input, label)
    with name_scope(default_main_program().unique("teacher_student_sigmoid_loss")):
        inside = torch.logical_and(input > soft_max_lower_bound, input < soft_max_up_bound)
        x = torch.where(inside, input, input.detach())
        grown = softplus(x)
        alone = grown - torch.where(label < -1.0, torch.zeros_like(x), x)
        return torch.where(label < 0.0, alone, 2.0 * grown - x * label)


def center_loss(
    input: Any, label: Any, num_classes: int, alpha: Any, param_attr: Any, update_center: bool = True
) -> Any:
    """Return half the squared distance of each row from the center of its class, [n, 1].

    Shapes: input [n, d]; label int [n, 1]. Centers w_0 [num_classes, d] are a buffer, one set a replica. Each run moves
    them by alpha sum(x - center) / (1 + count) over the rows of a class, after the loss; `update_center=False` never.
    """
    expect_ids("center_loss", label)
    prefix, wanted = default_main_program().unique("center_loss"), ParamAttr.of(param_attr) or ParamAttr()
    shape = [num_classes, expect_known("center_loss", input, 1)]
    with name_scope(prefix):
        start = wanted.initializer or Xavier()
        centers: Any = create_persistable(
            wanted.name or f"{prefix}.w_0", shape, input.desc.dtype, start, shared=wanted.name is not None
        )
        classes = label.reshape([-1]).long()
        away = input - torch.index_select(centers, 0, classes)
        loss = 0.5 * (away * away).sum(1, keepdim=True)
        if update_center:
            with torch.no_grad():
                counts = away.new_ones([num_classes, 1]).index_add(0, classes, away.new_ones([away.shape[0], 1]))
                total = torch.zeros_like(centers).index_add(0, classes, away)
                centers.add_(total / counts * alpha)
        return loss


def mean_iou(input: Any, label: Any, num_classes: int) -> tuple[Any, Any, Any]:
    """Return (the mean over classes of intersection over union, wrong counts, correct counts).

    Shapes: input and label int, of one shape; counts int32 [num_classes]. Wrong: rows of which a class is either of two
    different ones. A class that neither has does not count. A class out of range is an OperatorError of the run.
    """
    for ids in (input, label):
        expect_ids("mean_iou", ids)
    with name_scope(default_main_program().unique("mean_iou")), torch.no_grad():
        found, wanted = input.reshape([-1]).long(), label.reshape([-1]).long()
        hit = (found == wanted).to(torch.int32)
        none = hit.new_zeros([num_classes])
        correct = none.index_add(0, found, hit)
        wrong = none.index_add(0, found, 1 - hit).index_add(0, wanted, 1 - hit)
        union = wrong + correct
        share = correct.to(torch.float32) / union.clamp(min=1)
        return share.sum() / (union > 0).to(torch.float32).sum(), wrong, correct
