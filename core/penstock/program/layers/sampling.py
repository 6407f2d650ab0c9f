"""Losses over many classes that compute few of them: `nce`, `hsigmoid`, `sampled_softmax_with_cross_entropy`.

Ids that are drawn follow from `Program.random_seed`, as all random layers do: other ones in each run unless a `seed` is
given. With `is_sparse` the gradient of the weight is SelectedRows of the rows that were used.
Source: nce_op.h, hierarchical_sigmoid_op.h, matrix_bit_code.h, sample_logits_op.h (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.native.random import log_uniform
from penstock.program.initializers import Constant, Xavier
from penstock.program.layers.expected import expect_features, expect_ids
from penstock.program.layers.losses import softplus
from penstock.program.layers.random import distinct_ids, drawn
from penstock.program.layers.tensor import assign
from penstock.program.record.composite import sparse_lookup
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes, wrap
from penstock.program.training.parameters import ParamAttr, create_parameter

_SAMPLERS = ("uniform", "log_uniform", "custom_dist")
_HIT = 1e20  # what is taken from the score of a drawn class that is the true one
_TINY = 1e-20  # Fluid's TolerableValue


def _rows(table: Variable, ids: Any, *, is_sparse: bool) -> Any:
    """The rows of a table [n, d] at ids [..]: [.., d]."""
    if not is_sparse:
        return torch.embedding(table, ids)  # type: ignore[arg-type]  # Variables stand for tensors
    recording = recording_of(default_main_program())
    with recording_modes(recording):
        return wrap(recording, sparse_lookup(recording, table.fake, ids.fake, -1, zero_padding=False))


def _parameters(layer: str, prefix: str, input: Any, rows: int, attrs: Sequence[Any]) -> tuple[Variable, Any]:
    """The weight [rows, width of the input] and the bias [rows, 1], or None for bias_attr=False."""
    expect_features(layer, input, 1)
    weight_attr, bias_attr = (ParamAttr.of(attr) for attr in attrs)
    width, dtype = input.desc.shape[-1], input.desc.dtype
    if weight_attr is None or not isinstance(width, int) or input.ndim != 2:
        raise ProgramError(
            f"{user_line()}: {layer} needs an input [n, width] and a weight; got {input!r}, {attrs[0]!r}"
        )
    weight = create_parameter([rows, width], dtype, weight_attr, Xavier(), prefix=prefix, suffix="w_0")
    if bias_attr is None:
        return weight, None
    return weight, create_parameter([rows, 1], dtype, bias_attr, Constant(0.0), prefix=prefix, suffix="b_0")


def _scores(input: Any, ids: Any, weight: Variable, bias: Any, *, is_sparse: bool) -> Any:
    """input · weight[id] + bias[id] of each id. Shapes: input [n, d]; ids [n, k]; result [n, k]."""
    products = torch.matmul(_rows(weight, ids, is_sparse=is_sparse), input.unsqueeze(2)).squeeze(2)
    return products if bias is None else products + torch.embedding(bias, ids).squeeze(2)


def _expect_classes(layer: str, label: Any) -> None:
    expect_ids(layer, label)
    if label.ndim != 2 or not isinstance(label.desc.shape[1], int):
        raise ProgramError(f"{user_line()}: {layer} needs labels int64 [n, number of true classes]; got {label!r}")


# ---------------------------------------------------------------- noise contrastive estimation


def nce(
    input: Any,
    label: Any,
    num_total_classes: int,
    sample_weight: Any = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    num_neg_samples: int | None = None,
    name: str | None = None,
    sampler: str = "uniform",
    custom_dist: Sequence[float] | None = None,
    seed: int = 0,
    is_sparse: bool = False,
) -> Any:
    """Return the noise contrastive cost of each row, over 1 + `num_neg_samples` (10 if None): [n, 1].

    With o = sigmoid(input · w[c] + b[c]) and q(c) = `num_neg_samples` times the probability of c, a true class costs
    -log(o / (o + q)), a drawn one -log(q / (o + q)).
    Shapes: input [n, d]; label int64 [n, true classes]; sample_weight [n, 1]. Parameters: w_0 [classes, d], b_0
    [classes, 1]. `sampler`: uniform, log_uniform (small ids are drawn more often, the last one never, as in Fluid), or
    custom_dist with the probability of each class in `custom_dist`.
    """
    num = 10 if num_neg_samples is None else int(num_neg_samples)
    _expect_classes("nce", label)
    _expect_sampler(sampler, custom_dist, num_total_classes)
    prefix = name or default_main_program().unique("nce")
    with name_scope(prefix):
        weight, bias = _parameters("nce", prefix, input, num_total_classes, (param_attr, bias_attr))
        drawn_ids = _negatives(sampler, custom_dist, num_total_classes, [label.shape[0], num], seed)
        ids = torch.cat([label.to(torch.int64), drawn_ids], 1)
        noise = _probabilities(sampler, custom_dist, num_total_classes, ids, input.dtype) * num
        seen = torch.sigmoid(_scores(input, ids, weight, bias, is_sparse=is_sparse))
        of_true, of_drawn = -torch.log(seen / (seen + noise)), -torch.log(noise / (seen + noise))
        num_true = label.desc.shape[1]
        costs = torch.cat([of_true[:, :num_true], of_drawn[:, num_true:]], 1).sum(1, keepdim=True)
        return (costs if sample_weight is None else costs * sample_weight.reshape([-1, 1])) / (num + 1)


def _expect_sampler(sampler: str, custom_dist: Sequence[float] | None, num_classes: int) -> None:
    if sampler not in _SAMPLERS:
        raise ProgramError(f"{user_line()}: nce: sampler is {sampler!r}; expected one of {', '.join(_SAMPLERS)}")
    if sampler == "custom_dist" and (custom_dist is None or len(custom_dist) != num_classes):
        got = None if custom_dist is None else len(custom_dist)
        raise ProgramError(
            f"{user_line()}: nce(sampler='custom_dist') needs custom_dist, a probability for each of the {num_classes} "
            f"classes; got {got}"
        )


def _negatives(
    sampler: str, custom_dist: Sequence[float] | None, num_classes: int, sizes: Sequence[Any], seed: int
) -> Any:
    numbers = drawn("nce", "uniform", sizes, (0.0, 1.0), seed, "float64")
    with torch.no_grad():
        if sampler == "uniform":
            return (numbers * num_classes).to(torch.int64).clamp(max=num_classes - 1)
        if sampler == "log_uniform":
            return log_uniform(numbers, num_classes - 1)
        ends = assign(np.cumsum(np.asarray(custom_dist, np.float64)))
        return torch.searchsorted(ends, numbers, right=True).clamp(max=num_classes - 1)


def _probabilities(
    sampler: str, custom_dist: Sequence[float] | None, num_classes: int, ids: Any, dtype: torch.dtype
) -> Any:
    with torch.no_grad():
        if sampler == "uniform":
            return torch.full_like(ids, 1.0 / num_classes, dtype=dtype)
        if sampler == "log_uniform":
            return log_uniform_probability(ids, num_classes - 1, dtype)
        each = assign(np.asarray(custom_dist, np.float64)).to(dtype)
        return each[ids]


def log_uniform_probability(ids: Any, below: int, dtype: torch.dtype) -> Any:
    """Return how probable each id is where `log_uniform` draws it, by Fluid's formula for all ids."""
    wide = ids.to(dtype)
    return torch.log((wide + 2.0) / (wide + 1.0)) / math.log(below + 1)


# ---------------------------------------------------------------- hierarchical sigmoid


def hsigmoid(
    input: Any,
    label: Any,
    num_classes: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
    path_table: Any = None,
    path_code: Any = None,
    is_custom: bool = False,
    is_sparse: bool = False,
) -> Any:
    """Return the cost of the way to each row's class in a binary tree: [n, 1].

    Each node on the way costs log(1 + exp(s)) - code * s of its score s, cut to [-40, 40]. Shapes: input [n, d]; label
    int64 [n, 1]. The complete tree of `num_classes` leaves has w_0 [num_classes - 1, d], b_0 [num_classes - 1, 1].
    `is_custom`: path_table int64 [n, length] has the nodes on each row's way, -1 behind its end, path_code the codes 0
    and 1; the parameters have `num_classes` rows. As in Fluid, a position behind the end costs log(2), without
    gradient. `is_sparse` needs a tree of your own.
    """
    _expect_tree(num_classes, path_table, path_code, is_custom=is_custom)
    expect_ids("hsigmoid", label)
    prefix = name or default_main_program().unique("hsigmoid")
    with name_scope(prefix):
        rows = num_classes if is_custom else num_classes - 1
        weight, bias = _parameters("hsigmoid", prefix, input, rows, (param_attr, bias_attr))
        with torch.no_grad():
            nodes, codes = (path_table, path_code) if is_custom else _ways(label, num_classes)
            inside = _before_ends(nodes)
            # Behind an end the first node of the way stands in, so that no other row has a gradient.
            nodes = torch.where(inside, nodes, nodes[:, :1].clamp(min=0))
            codes = torch.where(inside, codes, torch.zeros_like(codes)).to(input.dtype)
        scores = _scores(input, nodes, weight, bias, is_sparse=is_sparse and is_custom)
        scores = torch.where(inside, scores, torch.zeros_like(scores))
        scores = scores + (scores.clamp(-40.0, 40.0) - scores).detach()  # Fluid's gradient does not see the cut
        return (softplus(scores) - codes * scores).sum(1, keepdim=True)


def _expect_tree(num_classes: Any, path_table: Any, path_code: Any, *, is_custom: bool) -> None:
    if is_custom and (path_table is None or path_code is None or num_classes is None):
        raise ProgramError(f"{user_line()}: hsigmoid(is_custom=True) needs path_table, path_code and num_classes")
    if not is_custom and (path_table is not None or path_code is not None):
        raise ProgramError(f"{user_line()}: hsigmoid: path_table and path_code need is_custom=True")
    if not is_custom and (num_classes is None or num_classes < 2):
        raise ProgramError(f"{user_line()}: hsigmoid: num_classes is {num_classes}; a tree needs at least 2 leaves")


def _ways(label: Any, num_classes: int) -> tuple[Any, Any]:
    """Nodes and codes of each row's way, leaf first; -1 behind its end.

    Leaf c is node c + num_classes of a heap with the root 1: the bits of that number are the codes, its prefixes the
    nodes.
    """
    leaf = label.reshape([-1, 1]).to(torch.int64) + num_classes
    bits = leaf.new_ones([(num_classes - 1).bit_length()]).cumsum(0) - 1
    return torch.bitwise_right_shift(leaf, bits + 1) - 1, torch.bitwise_and(torch.bitwise_right_shift(leaf, bits), 1)


def _before_ends(nodes: Any) -> Any:
    return (nodes >= 0).to(torch.int64).cumprod(1) > 0


# ---------------------------------------------------------------- sampled softmax


def sampled_softmax_with_cross_entropy(
    logits: Any,
    label: Any,
    num_samples: int,
    num_true: int = 1,
    remove_accidental_hits: bool = True,
    use_customized_samples: bool = False,
    customized_samples: Any = None,
    customized_probabilities: Any = None,
    seed: int = 0,
) -> Any:
    """Return the cross entropy of the true class among `num_samples` others, which all rows share: [n, 1].

    The others are different log-uniform ids; each score has the logarithm of how probable it was to be among them taken
    from it. `remove_accidental_hits`: a drawn class that is the true one does not count. `use_customized_samples`: the
    classes int64 [n, 1 + num_samples], the true one first, and their probabilities are given.
    Shapes: logits [n, classes]; label int64 [n, 1].
    """
    _expect_classes("sampled_softmax_with_cross_entropy", label)
    if num_true != 1 or label.desc.shape[1] != 1:
        raise ProgramError(
            f"{user_line()}: sampled_softmax_with_cross_entropy(num_true={num_true}) with {label!r}: one true class is "
            "possible, [n, 1]; sum the costs of several"
        )
    if use_customized_samples and (customized_samples is None or customized_probabilities is None):
        raise ProgramError(
            f"{user_line()}: use_customized_samples needs customized_samples and customized_probabilities"
        )
    with name_scope(default_main_program().unique("sampled_softmax_with_cross_entropy")):
        with torch.no_grad():
            if use_customized_samples:
                ids, probabilities = customized_samples, customized_probabilities
            else:
                ids, probabilities = _shared_samples(logits, label, num_samples, seed)
            offsets = torch.log(probabilities.clamp(min=_TINY))
            if remove_accidental_hits:
                hits = torch.cat([torch.zeros_like(label), (ids[:, 1:] == label).to(label.dtype)], 1)
                offsets = offsets + hits.to(logits.dtype) * _HIT
        scores = torch.gather(logits, 1, ids) - offsets
        return -F.log_softmax(scores, 1)[:, :1]


def _shared_samples(logits: Any, label: Any, num: int, seed: int) -> tuple[Any, Any]:
    """The true class and `num` others of each row, and how probable each was to be drawn."""
    classes = logits.desc.shape[-1]
    if not isinstance(classes, int) or not 0 < num < classes:
        raise ProgramError(
            f"{user_line()}: sampled_softmax_with_cross_entropy: {num} different ones of {classes} classes cannot be "
            "drawn"
        )
    others, tries = distinct_ids(classes, num, seed)
    ids = torch.cat([label.to(torch.int64), others.expand([label.shape[0], num])], 1)
    each = log_uniform_probability(ids, classes, logits.dtype)
    tried = tries.to(logits.dtype)
    met = -torch.expm1(tried * torch.log1p(-each))
    return ids, torch.where(tries == num, each * num, met)


__all__ = ["hsigmoid", "nce", "sampled_softmax_with_cross_entropy"]
