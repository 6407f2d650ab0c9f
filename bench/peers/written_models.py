"""Programs of Fluid's layers that are written as `__model__`, with what they are fed and deterministic parameters.

`MODELS` has a function for each, which records the network into the current Program and returns what is fetched.
`stored` saves one as `save_inference_model` does, in Penstock's own format. Tests and `bench.peers.fluid_written` use
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as fluid
from bench.peers.fluid_models import FEEDS, LEVELS
from penstock import layers
from penstock.program.program import Program
from penstock.scope import Scope

_TABLE = 12


@dataclass(frozen=True)
class Stored:
    """A saved inference model: its feeds by name, and what Penstock itself makes of them, by name of the target."""

    folder: Path
    feeds: Mapping[str, Any]
    fetched: Mapping[str, np.ndarray]


def _data(*names: str) -> list[Any]:
    """Inputs of FEEDS, of any number of rows."""
    return [
        layers.data(
            name, list(FEEDS[name].shape[1:]), dtype=str(FEEDS[name].dtype), lod_level=len(LEVELS.get(name, ()))
        )
        for name in names
    ]


def _ctr_dnn() -> list[Any]:
    """CTR-DNN: bags of ragged ids beside dense features."""
    ids, dense, pooled = *_data("ids", "dense"), []
    for kind in ("sum", "average", "sqrt"):
        pooled.append(layers.sequence_pool(layers.embedding(ids, [_TABLE, 4], is_sparse=True), kind))
    hidden = layers.fc(layers.concat([*pooled, dense], axis=1), 8, act="relu")
    hidden = layers.dropout(layers.fc(hidden, 6, act="relu"), 0.4)
    return [layers.fc(hidden, 2, act="softmax")]


def _deepfm() -> list[Any]:
    """DeepFM: sums of products of embeddings of dense ids, a first order and a network."""
    places, values = _data("places", "other2")
    column, values = layers.unsqueeze(places, [2]), layers.unsqueeze(values, [2])
    first = layers.reduce_sum(layers.elementwise_mul(layers.embedding(column, [_TABLE, 1]), values), 1)
    rows = layers.embedding(column, [_TABLE, 4], padding_idx=3) * values
    squared = layers.square(layers.reduce_sum(rows, 1))
    second = 0.5 * layers.reduce_sum(squared - layers.reduce_sum(layers.square(rows), 1), 1, keep_dim=True)
    deep = layers.fc(layers.fc(layers.reshape(rows, [-1, 8]), 6, act="tanh"), 1)
    return [layers.sigmoid(first + second + deep)]


def _lenet() -> list[Any]:
    """LeNet with batch-norm at rest: convolutions, both kinds of pooling, a softmax."""
    (image,) = _data("image")
    hidden = layers.conv2d(image, 4, 3, padding=1, act="relu")
    hidden = layers.pool2d(layers.batch_norm(hidden), 2, "max", 2)
    hidden = layers.batch_norm(layers.conv2d(hidden, 6, 2, groups=2, bias_attr=False), act="relu")
    hidden = layers.pool2d(hidden, 2, "avg", 1, pool_padding=1)
    return [layers.fc(hidden, 3, act="softmax")]


def _residual() -> list[Any]:
    """A residual block and a global pool; a transposed convolution beside it."""
    (image,) = _data("image")
    short = layers.conv2d(image, 4, 1)
    long = layers.batch_norm(layers.conv2d(image, 4, 3, padding=1, dilation=1), act="relu")
    joined = layers.relu(layers.elementwise_add(short, long))
    pooled = layers.pool2d(joined, global_pooling=True, pool_type="avg")
    parts = layers.adaptive_pool2d(joined, [2, 3], "avg")
    return [layers.fc(pooled, 3), parts, layers.conv2d_transpose(image, 2, filter_size=3, stride=2)]


def _attention() -> list[Any]:
    """Attention over steps of one length: matmul, softmax, layer_norm, transpose, split, stack."""
    (steps,) = _data("steps")
    heads = [layers.transpose(layers.reshape(layers.fc(steps, 4, num_flatten_dims=2), [0, 0, 2, 2]), [0, 2, 1, 3])
             for _ in range(2)]  # fmt: skip
    seen_by_heads = layers.matmul(layers.softmax(layers.matmul(heads[0], heads[1], transpose_y=True)), heads[1])
    query, key, value = (layers.fc(steps, 4, num_flatten_dims=2, bias_attr=bias) for bias in (False, None, None))
    scores = layers.scale(layers.matmul(query, key, transpose_y=True), scale=0.5)
    seen = layers.matmul(layers.softmax(scores), value)
    normal = layers.layer_norm(layers.elementwise_add(seen, value), begin_norm_axis=2)
    first, second = layers.split(normal, 2, dim=2)
    turned = layers.transpose(layers.stack([first, second], axis=1), [0, 2, 1, 3])
    return [seen_by_heads, layers.reshape(turned, [-1, 16]), layers.reduce_mean(normal, dim=[1]), layers.mean(normal)]


def _elements() -> list[Any]:
    """Arithmetic, activations, comparisons and choices, with numbers and variables."""
    dense, other, flags = _data("dense", "other", "flags")
    whole = layers.cast(layers.scale(dense, 10.0), "int64")
    near = [
        dense + 1.5, 1.0 - dense, dense / 3.0, dense * other, dense / (layers.abs(other) + 0.5), whole * 3 - 1,
        layers.elementwise_max(dense, other), layers.elementwise_min(dense, other), layers.pow(dense, 3.0),
        layers.leaky_relu(dense, 0.1), layers.gelu(dense), layers.swish(dense), layers.elu(dense, 0.7),
        layers.relu6(dense * 8.0), layers.hard_sigmoid(dense), layers.tanh(layers.sqrt(layers.square(dense))),
        layers.exp(layers.log(layers.abs(dense) + 1.0)), layers.clip(dense, -0.5, 0.5), layers.softplus(dense),
        layers.prelu(dense, "all"), layers.cast(layers.less_than(dense, other), "float32"),
        layers.cast(layers.logical_not(flags), "float32"), layers.sum([dense, other, dense]),
        layers.l2_normalize(dense, axis=1), layers.logsigmoid(dense), layers.softsign(dense),
    ]  # fmt: skip
    return near


def _parts() -> list[Any]:
    """Parts of variables, positions and constants."""
    dense, steps, classes, order = _data("dense", "steps", "classes", "order")
    best, where = layers.topk(dense, 2)
    filled = layers.fill_constant_batch_size_like(dense, [-1, 3], "float32", 0.25)
    return [
        layers.slice(steps, [1, 2], [1, 0], [3, 2]), layers.squeeze(dense[:, 1:2], [1]), layers.flatten(steps),
        layers.expand(dense, [1, 3]), layers.gather(dense, order), layers.one_hot(classes, 5), best, where,
        layers.argmax(dense, -1), layers.cumsum(dense, 1), filled, layers.pad(dense, [0, 0, 1, 2], 0.5),
        layers.reduce_max(steps, dim=-1, keep_dim=True), layers.reduce_sum(steps), layers.reduce_min(steps, dim=[1, 2]),
        layers.unsqueeze(layers.reduce_prod(dense, 1), [1]) * layers.fill_constant([1], "float32", 2.5),
        layers.elementwise_add(steps, layers.reduce_mean(steps, [2]), axis=0),
    ]  # fmt: skip


def _sequences() -> list[Any]:
    """Ragged rows to sequences and back, and what is fetched with its LoD."""
    ids, column, dense = _data("ids", "column", "dense")
    rows = layers.embedding(ids, [_TABLE, 4], padding_idx=0)
    hidden = layers.fc([rows, column], 5, act="tanh")
    weights = layers.sequence_softmax(layers.fc(hidden, 1))
    pooled = [layers.sequence_pool(hidden, kind) for kind in ("max", "last", "first")]
    spread = layers.sequence_expand_as(dense, ids)
    return [*pooled, layers.sequence_pool(layers.elementwise_mul(hidden, weights, axis=0), "sum"), spread, hidden]


def _recurrent() -> list[Any]:
    """A convolution over words, LSTM and GRU over ragged rows in both directions, with and without first states."""
    words, dense = _data("words", "dense")
    seen = layers.sequence_conv(words, 5, 3, act="tanh")
    first, last = layers.fc(dense, 4), layers.fc(dense, 4, act="tanh")
    hidden, cells = layers.dynamic_lstm(layers.fc(seen, 16), 16, first, last)
    plain, _ = layers.dynamic_lstm(
        layers.fc(seen, 12), 12, use_peepholes=False, is_reverse=True, candidate_activation="relu"
    )
    gated = layers.dynamic_gru(layers.fc(seen, 9), 3, is_reverse=True)
    origin = layers.dynamic_gru(layers.fc(seen, 12), 4, h_0=first, origin_mode=True, bias_attr=False)
    pooled = [layers.sequence_last_step(one) for one in (hidden, cells, plain, gated, origin)]
    window = layers.sequence_conv(words, 2, 2, padding_start=0, bias_attr=False)
    return [layers.fc(layers.concat(pooled, axis=1), 3, act="softmax"), gated, layers.sequence_pool(window, "max")]


def _images() -> list[Any]:
    """What else networks for images have: group-norm, resizing, padding by channels, volumes."""
    image, volume = _data("image", "volume")
    return [
        layers.group_norm(image, groups=3, epsilon=1e-3), layers.instance_norm(image),
        layers.resize_bilinear(image, [4, 9], align_corners=False, align_mode=0),
        layers.resize_nearest(image, [12, 12], align_corners=False), layers.pad2d(image, [1, 0, 2, 1], pad_value=0.5),
        layers.conv3d(volume, 2, 2), layers.pool3d(volume, 2, "max", 2), layers.prelu(image, "channel"),
        layers.reduce_mean(layers.transpose(image, [0, 2, 3, 1]), dim=[1, 2]), layers.l2_normalize(image, axis=1),
    ]  # fmt: skip


MODELS: dict[str, Callable[[], list[Any]]] = {
    "ctr_dnn": _ctr_dnn, "deepfm": _deepfm, "lenet": _lenet, "residual": _residual, "attention": _attention,
    "elements": _elements, "parts": _parts, "sequences": _sequences, "recurrent": _recurrent, "images": _images,
}  # fmt: skip


def stored(name: str, folder: Path) -> Stored:
    """Save a model with parameters that follow from their names' order, and run it."""
    main, startup, scope, executor = Program(), Program(), Scope(), fluid.Executor(fluid.CPUPlace())
    with fluid.program_guard(main, startup), fluid.unique_name.guard():
        targets = MODELS[name]()
    with fluid.scope_guard(scope):
        executor.run(startup)
        _set_parameters(main, scope)
        inputs = [var.name for var in main.feeds() if var.is_data]
        fluid.io.save_inference_model(str(folder), inputs, targets, executor, main)
        feeds = {one: fed(one) for one in inputs}
        test = main.clone(for_test=True)
        found = executor.run(test, feeds, [target.name for target in targets], return_numpy=False)
    return Stored(folder, feeds, {t.name: np.asarray(one) for t, one in zip(targets, found, strict=True)})


def fed(name: str) -> Any:
    """Return an input as it is fed, with its LoD."""
    return fluid.create_lod_tensor(FEEDS[name], LEVELS[name]) if name in LEVELS else FEEDS[name]


def _set_parameters(program: Program, scope: Scope) -> None:
    start = 1
    for var in sorted(program.variables.values(), key=lambda var: var.name):
        if not var.persistable or not var.dtype.startswith("float"):
            continue
        sizes = [int(str(size)) for size in var.shape]
        values = torch.sin(torch.arange(start, start + int(np.prod(sizes)), dtype=torch.float64) * 1.3)
        own = values.abs() + 0.5 if var.name.endswith(".variance") else values * 0.7
        scope.set(var.name, own.to(getattr(torch, var.dtype)).reshape(sizes))
        start += values.numel()
