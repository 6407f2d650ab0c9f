"""Formulas of losses of Fluid 1.8 whose kernels paddlepaddle 2.6.2 has dropped or changed, in NumPy, with sources.

Each takes a case's arrays and settings and returns the result. Arrays may be complex: `slopes` takes derivatives by a
complex step (Squire and Trapp, 1998), exact to rounding, so that only the values have to be written down. What a kernel
compares or counts is the real part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.peers.fluid_cases import Array
from bench.peers.fluid_losses import LossCase

_STEP = 1e-30
_LEAST = 1.17549435e-38
"""FLT_MIN."""
_TINY = 1e-20
_HIT = 1e20


def slopes(case: LossCase) -> dict[str, Array]:
    """Return the result of a case's formula, and the derivative of sum(result * weights) by each trained name."""
    formula: Callable[..., Array] = globals()[case.formula]
    plain = {name: v.astype(np.complex128) if name in case.trained else v for name, v in case.values().items()}

    def result(given: Mapping[str, Array]) -> Array:
        return formula(given, **case.arguments, **({"lengths": case.lengths} if case.lengths else {})).reshape(-1)

    found: dict[str, Array] = {"output": result(plain).real}
    for name in case.trained:
        slope = np.zeros(plain[name].shape)
        for place in np.ndindex(slope.shape):
            moved = plain[name].copy()
            moved[place] += 1j * _STEP
            slope[place] = (result({**plain, name: moved}) * case.weights()).sum().imag / _STEP
        found[name] = slope
    return found


def center_loss(given: Mapping[str, Array], num_classes: int, alpha: float, update_center: bool = True) -> Array:
    """paddle/fluid/operators/center_loss_op.h: half the squared distance of each row from its center."""
    away = given["input"] - given["param_attr"][given["label"][:, 0]]
    return np.asarray((away * away).sum(1) / 2)


def centers_after(case: LossCase) -> Array:
    """The same file: the centers after a run. A class without rows is divided by 1."""
    centers, label = case.parameters["param_attr"].copy(), case.inputs["label"][:, 0]
    if case.arguments.get("update_center", True):
        total, counts = np.zeros_like(centers), np.ones((len(centers), 1))
        np.add.at(total, label, case.inputs["input"] - centers[label])
        np.add.at(counts, label, 1.0)
        centers += case.arguments["alpha"] / counts * total
    return centers


def cos_sim(given: Mapping[str, Array]) -> Array:
    """cos_sim_op.h, math/cos_sim_functor.h: one row of Y stands for as many as X has; squares are 1e-8 at least."""
    x, y = given["X"], given["Y"]
    squares = [(v * v).sum(1) for v in (x, y)]
    lengths = [np.sqrt(np.where(v.real > 1e-8, v, 1e-8)) for v in squares]
    return np.asarray((x * y).sum(1) / (lengths[0] * lengths[1]))


def margin_rank_loss(given: Mapping[str, Array], margin: float) -> Array:
    """paddle/fluid/operators/margin_rank_loss_op.h."""
    loss = margin - given["label"] * (given["left"] - given["right"])
    return np.where(loss.real > 0, loss, 0.0)


def npair_loss(given: Mapping[str, Array], l2_reg: float) -> Array:
    """fluid.layers.npair_loss (python/paddle/fluid/layers/loss.py); 2.6.2 computes it in float32."""
    anchor, positive, labels = given["anchor"], given["positive"], given["labels"]
    same = (labels[:, None] == labels).astype(np.float64)
    targets = same / same.sum(1, keepdims=True)
    norms = ((anchor * anchor).sum(1).mean() + (positive * positive).sum(1).mean()) * 0.25 * l2_reg
    scores = anchor @ positive.T
    entropy = sum(
        targets[:, k : k + 1] * _entropies(scores, np.full(len(scores), k))[:, None] for k in range(len(same))
    )
    return np.asarray(norms + (targets * entropy).sum(0).mean())


def rank_loss(given: Mapping[str, Array]) -> Array:
    """paddle/fluid/operators/rank_loss_op.h; 2.6.2 has the operator without a kernel."""
    away = given["left"] - given["right"]
    return np.asarray(np.log(1 + np.exp(away)) - given["label"] * away)


def sampled_softmax(given: Mapping[str, Array], remove_accidental_hits: bool, **settings: Any) -> Array:
    """sample_logits_op.h, and softmax_with_cross_entropy of its results; python/paddle/fluid/layers/loss.py."""
    ids, chances = given["customized_samples"], given["customized_probabilities"]
    scores = np.take_along_axis(given["logits"], ids, 1)
    if remove_accidental_hits:
        hits = ids == given["label"]
        hits[:, 0] = False
        scores = scores - hits * _HIT
    scores = scores - np.log(np.clip(chances, _TINY, None))
    return _entropies(scores, np.zeros(len(ids), dtype=np.int64))


def _entropies(logits: Array, label: Array) -> Array:
    """softmax_with_cross_entropy of logits [n, classes] and labels [n]."""
    shifted = logits - logits.real.max(-1, keepdims=True)
    return np.asarray(np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, label[:, None], 1)[:, 0])


def sigmoid_focal_loss(given: Mapping[str, Array], gamma: float, alpha: float) -> Array:
    """paddle/fluid/operators/detection/sigmoid_focal_loss_op.h."""
    x, label = given["x"], given["label"]
    classes = np.arange(1, x.shape[1] + 1)
    is_class = label == classes
    is_other = (label != -1) & ~is_class
    share = 1 / (1 + np.exp(-x))
    found = (1 - share) ** gamma * np.log(np.where(share.real > _LEAST, share, _LEAST))
    above = x.real >= 0
    missed = share**gamma * (-x * above - np.log(1 + np.exp(x - 2 * x * above)))
    number = max(int(given["fg_num"][0]), 1)
    total = np.where(is_class, found * alpha, 0.0) + np.where(is_other, missed * (1 - alpha), 0.0)
    return np.asarray(-total / number)


def smooth_l1(given: Mapping[str, Array], sigma: float) -> Array:
    """paddle/fluid/operators/smooth_l1_loss_op.h."""
    away, square = (given["x"] - given["y"]) * given.get("inside_weight", 1.0), sigma * sigma
    size = np.where(away.real < 0, -away, away)
    loss = np.where(size.real < 1 / square, away * away * 0.5 * square, size - 0.5 / square)
    return np.asarray((loss * given.get("outside_weight", 1.0)).sum(1))


# -- ssd -------------------------------------------------------------------------------------------------------------


def ssd_loss(given: Mapping[str, Array], lengths: Mapping[str, Any], **settings: Any) -> Array:
    """fluid.layers.ssd_loss (python/paddle/fluid/layers/detection.py), an image after another.

    The kernels are iou_similarity_op.h, bipartite_match_op.cc, target_assign_op.h, mine_hard_examples_op.cc,
    box_coder_op.h and smooth_l1_loss_op.h.
    """
    ends = np.cumsum(lengths["gt_box"])
    loss, count = [], 0
    for image, (end, length) in enumerate(zip(ends, lengths["gt_box"], strict=True)):
        boxes, labels = given["gt_box"][end - length : end], given["gt_label"][end - length : end, 0]
        one, matched = _ssd_of_image(given, image, boxes, labels, settings)
        loss.append(one)
        count += matched
    return np.array(loss) / (count if settings.get("normalize", True) else 1)


def _ssd_of_image(
    given: Mapping[str, Array], image: int, boxes: Array, labels: Array, settings: Mapping[str, Any]
) -> tuple[Any, int]:
    """The loss of one image, and how many priors are matched."""
    priors, logits = given["prior_box"], given["confidence"][image]
    near = _overlaps(boxes, priors)
    match, closeness = _matches(near, settings)
    found = match >= 0
    worst = _entropies(logits, np.where(found, labels[match], 0).astype(np.int64)).real
    eligible = np.flatnonzero(~found & (closeness < settings.get("neg_overlap", 0.5)))
    order = eligible[np.argsort(-worst[eligible], kind="stable")]
    negatives = order[: int(found.sum() * settings.get("neg_pos_ratio", 3.0))]
    counts = found.copy()
    counts[negatives] = True
    entropy = _entropies(logits, np.where(found, labels[match], 0).astype(np.int64)) * counts
    away = given["location"][image] - _codes(boxes[match], priors, given["prior_box_var"])
    size = np.where(away.real < 0, -away, away)
    smooth = np.where(size.real < 1, away * away * 0.5, size - 0.5).sum(1) * found
    of_classes, of_places = settings.get("conf_loss_weight", 1.0), settings.get("loc_loss_weight", 1.0)
    return (entropy * of_classes + smooth * of_places).sum(), int(found.sum())


def _overlaps(boxes: Array, priors: Array) -> Array:
    low, high = np.maximum(boxes[:, None, :2], priors[:, :2]), np.minimum(boxes[:, None, 2:], priors[:, 2:])
    shared = np.clip(high - low, 0, None).prod(-1)
    sizes = [(one[:, 2:] - one[:, :2]).prod(-1) for one in (boxes, priors)]
    return np.asarray(shared / (sizes[0][:, None] + sizes[1] - shared))


def _matches(near: Array, settings: Mapping[str, Any]) -> tuple[Array, Array]:
    """Of each prior the box it is matched with, or -1, and how close it is to that one."""
    match, closeness, left = np.full(near.shape[1], -1), np.zeros(near.shape[1]), near.copy()
    while left.max() > 1e-6:
        box, prior = np.unravel_index(left.argmax(), left.shape)
        match[prior], closeness[prior] = box, near[box, prior]
        left[box], left[:, prior] = 0, 0
    if settings.get("match_type", "per_prediction") == "per_prediction":
        best = near.argmax(0)
        close = np.take_along_axis(near, best[None], 0)[0]
        more = (match < 0) & (close >= settings.get("overlap_threshold", 0.5))
        match[more], closeness[more] = best[more], close[more]
    return match, closeness


def _codes(boxes: Array, priors: Array, spread: Array) -> Array:
    """Boxes relative to priors, as they are encoded: centers and logarithms of sides, divided by the variances."""
    (sides, middle), (own_sides, own_middle) = (
        (one[:, 2:] - one[:, :2], (one[:, 2:] + one[:, :2]) / 2) for one in (priors, boxes)
    )
    return np.hstack([(own_middle - middle) / sides, np.log(np.abs(own_sides / sides))]) / spread
