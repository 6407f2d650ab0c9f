"""The workloads' networks in the words of paddlepaddle 2.6.2's static mode, for `paddle_executor`.

Imported in the peer's own environment only. `record` builds the workload's network, loss and update in the program that
is guarded. Its parameters are named as the workload's weights, except for those of the encoder layers, which paddle
names itself; `Recorded.initial` has the first value of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import static

from bench.workloads.sequences import HEADS
from bench.workloads.workload import Array, Workload


@dataclass(frozen=True, slots=True)
class Recorded:
    """A loss variable, and the initial value of every parameter by its name in the program.

    `parts`: the parameters that a weight of the workload is in, side by side along its last dimension.
    """

    loss: Any
    initial: dict[str, Array]
    parts: dict[str, list[str]]


def record(workload: Workload) -> Recorded:
    """Record the network, its mean cross entropy and its update into the current program."""
    initial, parts = dict(workload.weights), {name: [name] for name in workload.weights}
    if workload.name == "transformer":
        logits = _transformer(workload, initial, parts)
    else:
        logits = {"lenet": _lenet, "din": _din}.get(workload.name, _ctr)(workload)
    label = static.data("label", [None, 1], "int64")
    loss = paddle.mean(paddle.nn.functional.softmax_with_cross_entropy(logits, label))
    rate = workload.learning_rate
    if workload.optimizer == "sgd":
        paddle.optimizer.SGD(rate).minimize(loss)
    else:
        paddle.optimizer.Adam(rate, lazy_mode=True).minimize(loss)
    return Recorded(loss, initial, parts)


def feeds(workload: Workload) -> Iterator[dict[str, Any]]:
    """Give every batch as the data layers of `record` want it: arrays; slots of several ids as rows and lengths."""
    for step in range(workload.num_batches):
        batch = workload.batch(step)
        if "lengths" in batch:
            slots = {f"C{slot + 1}": (ids[:, None], own) for slot, (ids, own) in enumerate(workload.bags(step))}
            yield slots | {"dense": batch["dense"], "label": batch["label"]}
        elif "dense" in batch:
            number = batch["ids"].shape[1]
            yield {f"C{slot + 1}": batch["ids"][:, slot : slot + 1] for slot in range(number)} | {
                "dense": batch["dense"],
                "label": batch["label"],
            }
        else:
            yield batch


def _ctr(workload: Workload) -> Any:
    shared, several = "table" in workload.weights, "lengths" in workload.feeds
    parts = []
    for slot in range(workload.feeds["ids"].shape[2]):
        ids = static.data(f"C{slot + 1}", [None, 1], "int64", lod_level=int(several))
        name = "table" if shared else f"table{slot}"
        size = list(workload.weights[name].shape)
        row = static.nn.embedding(ids, size, is_sparse=True, param_attr=paddle.ParamAttr(name=name))
        row = static.nn.sequence_lod.sequence_pool(row, "sum") if several else row
        parts.append(paddle.reshape(row, [-1, size[1]]))
    parts.append(static.data("dense", [None, workload.feeds["dense"].shape[2]], "float32"))
    return tower(workload, paddle.concat(parts, axis=1))


def tower(workload: Workload, hidden: Any, prefix: str = "") -> Any:
    """Record the workload's linear layers, with relu between them."""
    last = sum(name.startswith(f"{prefix}w") for name in workload.weights) - 1
    for layer in range(last + 1):
        hidden = _linear(workload, hidden, f"{prefix}w{layer}", f"{prefix}b{layer}", "relu" if layer < last else None)
    return hidden


def _linear(workload: Workload, x: Any, weight: str, bias: str, act: str | None = None) -> Any:
    return static.nn.fc(
        x,
        workload.weights[weight].shape[1],
        num_flatten_dims=len(x.shape) - 1,
        weight_attr=paddle.ParamAttr(name=weight),
        bias_attr=paddle.ParamAttr(name=bias) if bias in workload.weights else False,
        activation=act,
    )


def _din(workload: Workload) -> Any:
    """Attention over a history: as `bench.models.modules.Interest` has it."""
    target, history = static.data("target", [None, 2], "int64"), static.data("history", [None, None, 2], "int64")

    def rows(ids: Any, column: int) -> Any:
        size = list(workload.weights[f"table{column}"].shape)
        name = paddle.ParamAttr(name=f"table{column}")
        return static.nn.embedding(ids, size, is_sparse=True, param_attr=name)

    targets = paddle.concat([rows(target[:, column], column) for column in range(2)], axis=1)
    clicks = paddle.concat([rows(history[:, :, column], column) for column in range(2)], axis=2)
    beside = paddle.expand_as(paddle.unsqueeze(targets, 1), clicks)
    pairs = paddle.concat([beside, clicks, beside - clicks, beside * clicks], axis=2)
    padding = paddle.cast(history[:, :, 0] == 0, "float32")
    scores = paddle.squeeze(tower(workload, pairs, "a."), 2) - 1e9 * padding
    weights = paddle.nn.functional.softmax(scores, axis=1)
    interest = paddle.squeeze(paddle.bmm(paddle.unsqueeze(weights, 1), clicks), 1)
    return tower(workload, paddle.concat([interest, targets, interest * targets], axis=1))


def _lenet(workload: Workload) -> Any:
    x = static.data("image", [None, *workload.feeds["image"].shape[2:]], "float32")
    for number in range(2):
        after, _, size, _ = workload.weights[f"conv{number}"].shape
        names = {"param_attr": f"conv{number}", "bias_attr": f"bias{number}"}
        attributes = {key: paddle.ParamAttr(name=name) for key, name in names.items()}
        x = static.nn.conv2d(x, after, size, act="relu", **attributes)
        x = paddle.nn.functional.max_pool2d(x, 2, 2)
    return tower(workload, paddle.flatten(x, 1))


def _transformer(workload: Workload, initial: dict[str, Array], parts: dict[str, list[str]]) -> Any:
    weights = workload.weights
    length, width = weights["position"].shape
    ids = static.data("ids", [None, length], "int64")
    table = static.nn.embedding(ids, list(weights["table"].shape), param_attr=paddle.ParamAttr(name="table"))
    position = static.create_parameter([length, width], "float32", attr=paddle.ParamAttr(name="position"))
    x = table + position
    layer = 0
    while f"in{layer}.w0" in weights:
        x = _encoder_layer(layer, workload, initial, parts)(x)
        layer += 1
    return _linear(workload, paddle.mean(x, axis=1), "head.w0", "head.b0")


def _encoder_layer(number: int, workload: Workload, initial: dict[str, Array], parts: dict[str, list[str]]) -> Any:
    """Make paddle's layer, and replace its weights by its own names: paddle has the three projections apart."""
    weights = workload.weights
    width, inner = weights[f"inner{number}.w0"].shape
    layer = paddle.nn.TransformerEncoderLayer(width, HEADS, inner, dropout=0.0)
    own = layer.self_attn
    weights_apart = np.split(initial.pop(f"in{number}.w0"), 3, axis=1)
    biases_apart = np.split(initial.pop(f"in{number}.b0"), 3)
    projections = (own.q_proj, own.k_proj, own.v_proj)
    parts[f"in{number}.w0"] = [linear.weight.name for linear in projections]
    parts[f"in{number}.b0"] = [linear.bias.name for linear in projections]
    for linear, weight, bias in zip(projections, weights_apart, biases_apart, strict=True):
        initial |= {linear.weight.name: weight.copy(), linear.bias.name: bias.copy()}
    for linear, key, which in ((own.out_proj, "out", 0), (layer.linear1, "inner", 0), (layer.linear2, "inner", 1)):
        initial[linear.weight.name] = initial.pop(f"{key}{number}.w{which}")
        initial[linear.bias.name] = initial.pop(f"{key}{number}.b{which}")
        parts[f"{key}{number}.w{which}"], parts[f"{key}{number}.b{which}"] = [linear.weight.name], [linear.bias.name]
    return layer
