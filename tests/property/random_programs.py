"""Random training programs: a recipe is plain data that Hypothesis draws and shrinks; `build` records it.

A recipe is a list of (step, a, b); a and b choose operands and sizes, modulo what there is. Every step takes
matrices [rows, width] and adds one, so any recipe is a valid program. Steps in `MIXING_ROWS` let a row see the
others, so that a share of the batch does not compute what the whole does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tests.property.networks import Feed, Network, optimizer
from torch import nn

import penstock as fluid
from penstock.program.program import Program

VOCABULARY = 12
Step = tuple[str, int, int]


@dataclass(frozen=True)
class Recipe:
    """What `build` records. `num_losses`: how many of the last matrices become losses that are summed."""

    steps: tuple[Step, ...]
    num_losses: int
    kind: str


@dataclass
class Workshop:
    """The matrices made so far, and the modules that are used again."""

    dtype: str
    ids: Any
    made: list[Any]
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def pick(self, choice: int) -> Any:
        return self.made[choice % len(self.made)]

    def width(self, x: Any) -> int:
        return int(x.desc.shape[1])

    def like(self, x: Any, choice: int) -> Any:
        """Another matrix of x's width, or x itself."""
        same = [m for m in self.made if self.width(m) == self.width(x)]
        return same[choice % len(same)]

    def module(self, key: str, make: Callable[[], nn.Module]) -> nn.Module:
        if key not in self.modules:
            torch.manual_seed(len(self.modules))
            self.modules[key] = make().to(getattr(torch, self.dtype))
        return self.modules[key]


def _fc(w: Workshop, a: int, b: int) -> Any:
    return fluid.layers.fc(w.pick(a), 1 + b % 6, act=[None, "relu", "tanh", "sigmoid"][b % 4])


def _fc_of_two(w: Workshop, a: int, b: int) -> Any:
    return fluid.layers.fc([w.pick(a), w.pick(b)], 4)


def _shared_fc(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    name = f"shared_{w.width(x)}_{b % 2}"
    return fluid.layers.fc(x, 4, param_attr=fluid.ParamAttr(name=name), bias_attr=False)


def _linear_twice(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    linear = w.module(f"linear {w.width(x)}", lambda: nn.Linear(w.width(x), w.width(x)))
    return linear(torch.tanh(linear(x)))


class SummedWeights(nn.Module):
    """Two parameters of which torch gives the very same tensor as gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, 3))
        self.second = nn.Parameter(torch.randn(width, 3))

    def forward(self, x: Any) -> Any:
        return x @ (self.first + self.second)


def _summed_weights(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    return w.module(f"summed {w.width(x)} {b % 2}", lambda: SummedWeights(w.width(x)))(x)


def _embedding(w: Workshop, a: int, b: int, *, sparse: bool) -> Any:
    column = w.ids[:, a % 2 : a % 2 + 1]
    attr = fluid.ParamAttr(name=f"table_{b % 2}_{sparse}", initializer=fluid.initializer.Normal(0.0, 0.5))
    padding = 3 if b % 3 == 0 else None
    return fluid.layers.embedding(column, [VOCABULARY, 3], sparse, False, padding, attr, w.dtype)


def _module_embedding(w: Workshop, a: int, b: int) -> Any:
    table = w.module(f"table {b % 2}", lambda: nn.Embedding(VOCABULARY, 2, sparse=b % 2 == 0))
    return table(w.ids).flatten(1)


def _binary(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    y = w.like(x, b)
    return [x + y, x * y, x - y, torch.where(x > y, x, y * 0.5)][b % 4]


def _unary(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    return [torch.tanh(x), torch.sigmoid(x), x.abs(), x * 2.0 + 1.0, F.gelu(x), F.softmax(x, -1)][b % 6]


def _reshaped(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    pair = torch.stack([x, x * 3.0], 1)  # [rows, 2, width]
    if b % 3 == 0:
        return pair.reshape(x.shape[0] * 2, -1).view(-1, 2 * w.width(x))
    if b % 3 == 1:
        return pair.transpose(1, 2).sum(2)
    return pair.permute(1, 0, 2)[1]


def _sliced(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    first = b % w.width(x)
    return x[:, first:]


def _split(w: Workshop, a: int, b: int) -> Any:
    x: Any = torch.cat([w.pick(a), w.pick(b)], 1)
    left, right = x.split([1, w.width(x) - 1], 1)
    return right + left if b % 2 else torch.cat([right, left], 1)


def _joined(w: Workshop, a: int, b: int) -> Any:
    return fluid.layers.concat([w.pick(a), w.pick(b)], axis=1)


def _in_place(w: Workshop, a: int, b: int) -> Any:
    """A view read before and after its base is written, and a base read before it is written."""
    y = w.pick(a).clone()
    view = y[:, :1]
    before = y + 1.0
    if b % 3 == 0:
        y.mul_(0.5)
    elif b % 3 == 1:
        view.add_(2.0)
    else:
        y[:, 0] = 0.25
    return before + y + view


def _in_place_relu(w: Workshop, a: int, b: int) -> Any:
    return F.relu(w.pick(a) - 0.1, inplace=True)


def _dropout(w: Workshop, a: int, b: int) -> Any:
    return F.dropout(w.pick(a), [0.5, 0.1, 0.0][b % 3])


def _layer_norm(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    return w.module(f"layer norm {w.width(x)} {b % 2}", lambda: nn.LayerNorm(w.width(x)))(x)


def _batch_norm(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    return w.module(f"batch norm {w.width(x)} {b % 2}", lambda: nn.BatchNorm1d(w.width(x)))(torch.cat([x, x * 0.5]))[
        : x.shape[0]
    ]


def _centred(w: Workshop, a: int, b: int) -> Any:
    x = w.pick(a)
    return x - x.mean(0, keepdim=True)


STEPS: dict[str, Callable[[Workshop, int, int], Any]] = {
    "fc": _fc,
    "fc of two": _fc_of_two,
    "shared fc": _shared_fc,
    "linear twice": _linear_twice,
    "summed weights": _summed_weights,
    "sparse embedding": lambda w, a, b: _embedding(w, a, b, sparse=True),
    "dense embedding": lambda w, a, b: _embedding(w, a, b, sparse=False),
    "module embedding": _module_embedding,
    "binary": _binary,
    "unary": _unary,
    "reshape": _reshaped,
    "slice": _sliced,
    "split": _split,
    "concat": _joined,
    "in place": _in_place,
    "in-place relu": _in_place_relu,
    "dropout": _dropout,
    "layer norm": _layer_norm,
    "batch norm": _batch_norm,
    "centre": _centred,
}
MIXING_ROWS = {"batch norm", "centre"}


def recipes(*, rows_independent: bool = False) -> st.SearchStrategy[Recipe]:
    """Return the strategy of recipes; `rows_independent` leaves out steps in which rows see each other."""
    names = [n for n in STEPS if not (rows_independent and n in MIXING_ROWS)]
    step = st.tuples(st.sampled_from(names), st.integers(0, 7), st.integers(0, 11))
    return st.builds(
        Recipe,
        steps=st.lists(step, min_size=1, max_size=8).map(tuple),
        num_losses=st.integers(1, 3),
        kind=st.sampled_from(["sgd", "adam"]),
    )


def build(recipe: Recipe, dtype: str = "float32") -> Network:
    """Record a recipe. The loss is a sum of means over rows; a last layer makes it depend on a parameter."""
    main, startup = Program(seed=21), Program(seed=21)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype=dtype)
        ids = fluid.layers.data(name="ids", shape=[2], dtype="int64")
        target = fluid.layers.data(name="target", shape=[1], dtype=dtype)
        workshop = Workshop(dtype, ids, [x])
        for name, a, b in recipe.steps:
            workshop.made.append(STEPS[name](workshop, a, b))
        loss: Any = 0.0
        for part in workshop.made[-recipe.num_losses :]:
            predicted = fluid.layers.fc(torch.tanh(part), 1)
            loss = fluid.layers.mean(fluid.layers.square_error_cost(predicted, target)) + loss
        optimizer(recipe.kind).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {
            "x": random.normal(size=(rows, 4)).astype(dtype),
            "ids": random.integers(0, VOCABULARY, (rows, 2)),
            "target": random.normal(size=(rows, 1)).astype(dtype),
        }

    return Network("random program", main, startup, loss.name, feed)
