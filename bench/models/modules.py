"""The workloads' networks as torch modules that start from the workload's values.

Each is a `Network`: `front`, which makes features (here are the sparse tables, if there are any), and `body`, which
makes logits of them. Peers that cannot handle sparse gradients in one piece use the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.workloads.sequences import HEADS, INNER, LAYERS, WIDTH
from bench.workloads.workload import Array, Workload


class Network(nn.Module):
    """`forward(*inputs)` gives logits, float32[rows, classes]; inputs are the feeds without the label, in order."""

    def __init__(self, front: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.front, self.body = front, body

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.body(self.front(*inputs))
        return logits

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Return the tables whose gradients are sparse."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        tables = [table for table in self.modules() if isinstance(table, kinds) and table.sparse]
        return [parameter for table in tables for parameter in table.parameters()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return all others."""
        sparse = {id(table) for table in self.sparse_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sparse]


class SharedTable(nn.Module):
    """Looks all slots up in one table: ids int64[rows, slots], dense float32[rows, features]."""

    def __init__(self, table: Array) -> None:
        super().__init__()
        self.table = _embedding(table, sparse=True)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return torch.cat([self.table(ids).flatten(1), dense], dim=1)


class OwnTables(nn.Module):
    """Looks each slot up in a table of its own: ids int64[rows, slots], dense float32[rows, features]."""

    def __init__(self, tables: list[Array]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(_embedding(table, sparse=True) for table in tables)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        parts = [table(ids[:, slot]) for slot, table in enumerate(self.tables)]
        return torch.cat([*parts, dense], dim=1)


class Bags(nn.Module):
    """Sums the rows of each slot's ids: ids int64[all], slot after slot, offsets int64[slots x rows + 1], dense.

    One table, which all slots share, or a table each.
    """

    def __init__(self, tables: list[Array], slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.tables = nn.ModuleList(_bag(table) for table in tables)

    def forward(self, ids: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        rows = len(dense)
        if len(self.tables) == 1:
            pooled = self.tables[0](ids, offsets).view(self.slots, rows, -1)
            return torch.cat([pooled.transpose(0, 1).flatten(1), dense], dim=1)
        ends = offsets[::rows].tolist()
        parts = [
            table(ids[ends[slot] : ends[slot + 1]], offsets[slot * rows : (slot + 1) * rows + 1] - ends[slot])
            for slot, table in enumerate(self.tables)
        ]
        return torch.cat([*parts, dense], dim=1)


class ClickRows(nn.Module):
    """Looks up items and categories: target int64[rows, 2], history int64[rows, clicks, 2], padded with zeros.

    Gives the target's rows [rows, width], the clicks' [rows, clicks, width], and which clicks are padding.
    """

    def __init__(self, tables: list[Array]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(_embedding(table, sparse=True) for table in tables)

    def forward(self, target: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        targets = [table(target[:, column]) for column, table in enumerate(self.tables)]
        clicks = [table(history[:, :, column]) for column, table in enumerate(self.tables)]
        return torch.cat(targets, dim=1), torch.cat(clicks, dim=2), history[:, :, 0] == 0


class Interest(nn.Module):
    """Weighs clicks by attention to the target, and classifies target and interest."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__()
        self.attention, self.tower = _tower(weights, "a."), _tower(weights)

    def forward(self, features: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        target, clicks, padding = features
        beside = target.unsqueeze(1).expand_as(clicks)
        pairs = torch.cat([beside, clicks, beside - clicks, beside * clicks], dim=2)
        scores = self.attention(pairs).squeeze(2).masked_fill(padding, -1e9)
        interest = torch.bmm(torch.softmax(scores, dim=1).unsqueeze(1), clicks).squeeze(1)
        logits: Tensor = self.tower(torch.cat([interest, target, interest * target], dim=1))
        return logits


class Encoder(nn.Module):
    """Torch's own encoder layers over symbols and their positions, the mean over symbols, and a linear layer."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__()
        self.table = _embedding(weights["table"], sparse=False)
        self.position = nn.Parameter(torch.tensor(weights["position"]))
        self.layers = nn.ModuleList(_encoder_layer(weights, layer) for layer in range(LAYERS))
        self.head = _linear(weights["head.w0"], weights["head.b0"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


def network(workload: Workload) -> Network:
    """Build the workload's network with its initial values (copies)."""
    weights = workload.weights
    if workload.name == "lenet":
        return Network(nn.Identity(), _lenet(weights))
    if workload.name == "transformer":
        return Network(nn.Identity(), Encoder(weights))
    if workload.name == "din":
        return Network(ClickRows([weights["table0"], weights["table1"]]), Interest(weights))
    slots = sorted((key for key in weights if key.startswith("table") and key != "table"), key=lambda k: int(k[5:]))
    if "lengths" in workload.feeds:
        tables = [weights[key] for key in slots or ["table"]]
        return Network(Bags(tables, workload.feeds["lengths"].shape[2]), _tower(weights))
    front = OwnTables([weights[key] for key in slots]) if slots else SharedTable(weights["table"])
    return Network(front, _tower(weights))


def optimizers(
    workload: Workload, model: Network, *, fused: bool = True, capturable: bool = False
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a torch user would take: a fused one for dense values, a sparse one for tables.

    `capturable`: one whose step may be part of a CUDA graph.
    """
    rate, sparse = workload.learning_rate, model.sparse_parameters()
    made: list[torch.optim.Optimizer] = []
    if workload.optimizer == "sgd":
        made.append(torch.optim.SGD(model.dense_parameters(), lr=rate, fused=fused))
        return [*made, torch.optim.SGD(sparse, lr=rate)] if sparse else made
    made.append(torch.optim.Adam(model.dense_parameters(), lr=rate, fused=fused, capturable=capturable))
    return [*made, torch.optim.SparseAdam(sparse, lr=rate)] if sparse else made


def loss_of(logits: Tensor, label: Tensor) -> Tensor:
    """Return the mean cross entropy; label int64[rows, 1]."""
    return nn.functional.cross_entropy(logits, label.squeeze(1))


def trained(workload: Workload, parameters: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the workload's weights as they are in `parameters`, named and ordered as in `network(workload)`. Views.

    Module order is the workload's own but for the position, which a module's own parameters come before; norms are not
    among the workload's weights, since they start from ones and zeros everywhere.
    """
    names = sorted(workload.weights, key=lambda name: name != "position")
    kept = [tensor.detach() for path, tensor in parameters.items() if ".norm" not in path]
    found = {}
    for name, tensor in zip(names, kept, strict=True):
        linear = tensor.ndim == 2 and not name.startswith(("table", "position"))  # torch has them [outputs, inputs]
        found[name] = (tensor.T if linear else tensor).numpy()
    return found


def tensors(workload: Workload) -> list[dict[str, Tensor]]:
    """Cut every batch once, as tensors. Slots of several ids: as `Bags` takes them, which is FBGEMM's layout."""
    if "lengths" in workload.feeds:
        return [_flat(workload, step) for step in range(workload.num_batches)]
    return [
        {name: torch.tensor(values) for name, values in workload.batch(step).items()}
        for step in range(workload.num_batches)
    ]


def _flat(workload: Workload, step: int) -> dict[str, Tensor]:
    batch, slots = workload.batch(step), workload.bags(step)
    ends = np.concatenate([[0], *(lengths for _, lengths in slots)]).cumsum()
    made = {"ids": np.concatenate([ids for ids, _ in slots]), "offsets": ends}
    return {name: torch.tensor(v) for name, v in (made | {k: batch[k] for k in ("dense", "label")}).items()}


def _bag(table: Array) -> nn.EmbeddingBag:
    rows, width = table.shape
    values = torch.tensor(table)
    return nn.EmbeddingBag(rows, width, mode="sum", sparse=True, include_last_offset=True, _weight=values)


def _embedding(table: Array, *, sparse: bool) -> nn.Embedding:
    rows, width = table.shape
    return nn.Embedding(rows, width, sparse=sparse, _weight=torch.tensor(table))


def _linear(weight: Array, bias: Array | None) -> nn.Linear:
    inputs, outputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None)
    _put(layer.weight, weight.T)
    if bias is not None:
        _put(layer.bias, bias)
    return layer


def _put(parameter: Any, value: Array) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(value))


def _tower(weights: Mapping[str, Array], prefix: str = "") -> nn.Sequential:
    layers: list[nn.Module] = []
    while f"{prefix}w{len(layers) // 2}" in weights:
        number = len(layers) // 2
        layers += [_linear(weights[f"{prefix}w{number}"], weights.get(f"{prefix}b{number}")), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _lenet(weights: Mapping[str, Array]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(2):
        after, before, size, _ = weights[f"conv{number}"].shape
        convolution = nn.Conv2d(before, after, size)
        _put(convolution.weight, weights[f"conv{number}"])
        _put(convolution.bias, weights[f"bias{number}"])
        layers += [convolution, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), *_tower(weights))


def _encoder_layer(weights: Mapping[str, Array], number: int) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)
    _put(layer.self_attn.in_proj_weight, weights[f"in{number}.w0"].T)
    _put(layer.self_attn.in_proj_bias, weights[f"in{number}.b0"])
    for target, key in ((layer.self_attn.out_proj, "out"), (layer.linear1, "inner"), (layer.linear2, "inner")):
        which = 1 if target is layer.linear2 else 0
        _put(target.weight, weights[f"{key}{number}.w{which}"].T)
        _put(target.bias, weights[f"{key}{number}.b{which}"])
    return layer
