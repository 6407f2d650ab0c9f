"""The networks that every oracle runs: small, but with each kind of layer and gradient. Imported by tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

import penstock as fluid
from penstock.program.program import Program

Feed = dict[str, npt.NDArray[np.generic]]
P = ParamSpec("P")


@dataclass(frozen=True)
class Network:
    """A training program, how to start it, and a source of batches: `feed(rows, seed)`."""

    name: str
    main: Program
    startup: Program
    loss: str
    feed: Callable[[int, int], Feed]
    fetches: tuple[str, ...] = ()

    @property
    def all_fetches(self) -> list[str]:
        """The loss first."""
        return [self.loss, *self.fetches]


def recorded_once(make: Callable[P, Network]) -> Callable[P, Network]:
    """Give clones of what was recorded first: recording takes up to a second, many times what a step does."""
    recorded: dict[object, Network] = {}

    @functools.wraps(make)
    def clone(*args: P.args, **kwargs: P.kwargs) -> Network:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in recorded:
            recorded[key] = make(*args, **kwargs)
        one = recorded[key]
        return replace(one, main=one.main.clone(), startup=one.startup.clone())

    return clone


def optimizer(kind: str) -> fluid.optimizer.Optimizer:
    """SGD or Adam with rates that move small networks visibly."""
    return fluid.optimizer.SGD(learning_rate=0.1) if kind == "sgd" else fluid.optimizer.Adam(learning_rate=0.01)


@recorded_once
def fit_a_line(kind: str = "sgd", dtype: str = "float32") -> Network:
    """One fully connected layer and a square error."""
    main, startup = Program(seed=11), Program(seed=11)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[13], dtype=dtype)
        y = fluid.layers.data(name="y", shape=[1], dtype=dtype)
        predicted = fluid.layers.fc(input=x, size=1)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(input=predicted, label=y))
        optimizer(kind).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {"x": random.normal(size=(rows, 13)).astype(dtype), "y": random.normal(size=(rows, 1)).astype(dtype)}

    return Network("fit_a_line", main, startup, loss.name, feed, (predicted.name,))


@recorded_once
def ctr_dnn(kind: str = "adam", dtype: str = "float32", *, sparse: bool = True, metrics: bool = True) -> Network:
    """Click-through: a shared table over two slots, one table of its own, a dense one, a tower with dropout."""
    main, startup = Program(seed=5), Program(seed=5)
    with fluid.program_guard(main, startup):
        slots = [fluid.layers.data(name=f"slot{i}", shape=[1], dtype="int64") for i in range(4)]
        numbers = fluid.layers.data(name="numbers", shape=[3], dtype=dtype)
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        shared = fluid.ParamAttr(name="shared_table", initializer=fluid.initializer.Normal(0.0, 0.5))
        rows = [
            fluid.layers.embedding(slots[0], [50, 4], is_sparse=sparse, param_attr=shared, dtype=dtype),
            fluid.layers.embedding(slots[1], [50, 4], is_sparse=sparse, param_attr=shared, dtype=dtype),
            fluid.layers.embedding(slots[2], [30, 4], is_sparse=sparse, padding_idx=0, dtype=dtype),
            fluid.layers.embedding(slots[3], [7, 4], dtype=dtype),
        ]
        joined = fluid.layers.concat([*rows, numbers], axis=1)
        hidden = F.dropout(fluid.layers.fc(joined, 16, act="relu"), 0.3)
        hidden = fluid.layers.fc(hidden, 8, act="relu")
        predicted = fluid.layers.fc(hidden, 2, act="softmax")
        loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, label))
        fetches = [predicted.name]
        if metrics:
            auc, batch_auc, _ = fluid.layers.auc(predicted, label, num_thresholds=255)
            fetches += [auc.name, batch_auc.name, fluid.layers.accuracy(predicted, label).name]
        optimizer(kind).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        sizes = (50, 50, 30, 7)
        found: Feed = {f"slot{i}": random.integers(0, n, (rows, 1)) for i, n in enumerate(sizes)}
        found["numbers"] = random.normal(size=(rows, 3)).astype(dtype)
        found["label"] = random.integers(0, 2, (rows, 1))
        return found

    return Network("ctr_dnn", main, startup, loss.name, feed, tuple(fetches))


def conv_module(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two convolutions with batch-norm, pooled, and a linear layer; always the same weights.

    No bias right before a batch-norm: its gradient is zero but for rounding, which Adam would blow up.
    """
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(inplace=True), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    ).to(dtype)  # fmt: skip


def transformer_module(dtype: torch.dtype = torch.float32, *, dropout: float = 0.1, bias: bool = True) -> nn.Module:
    """One transformer layer, always the same weights."""
    torch.manual_seed(4)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, bias=bias, batch_first=True).to(dtype)


def from_module(
    name: str, module: nn.Module, shape: tuple[int, ...], classes: int, kind: str = "sgd", dtype: str = "float32"
) -> Network:
    """A module called on an input [n, *shape], classified into `classes` by its mean over all but the last size."""
    main, startup = Program(seed=9), Program(seed=9)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=list(shape), dtype=dtype)
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        out = module(x)
        out = out.mean(1) if out.ndim == 3 else out
        predicted = fluid.layers.softmax(out)
        loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, label))
        optimizer(kind).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {
            "x": random.normal(size=(rows, *shape)).astype(dtype),
            "label": random.integers(0, classes, (rows, 1)),
        }

    return Network(name, main, startup, loss.name, feed, (predicted.name,))


@recorded_once
def conv_net(kind: str = "sgd", dtype: str = "float32") -> Network:
    """Convolutions and batch-norm."""
    return from_module("conv_net", conv_module(getattr(torch, dtype)), (2, 6, 6), 3, kind, dtype)


@recorded_once
def transformer(kind: str = "adam", dtype: str = "float32") -> Network:
    """Attention, layer-norm, dropout."""
    return from_module("transformer", transformer_module(getattr(torch, dtype)), (5, 8), 8, kind, dtype)


NETWORKS: dict[str, Callable[[], Network]] = {
    "fit_a_line": fit_a_line,
    "ctr_dnn": ctr_dnn,
    "ctr_dnn_dense_sgd": lambda: ctr_dnn("sgd", sparse=False),
    "conv_net": conv_net,
    "transformer": transformer,
}
