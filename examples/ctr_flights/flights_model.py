"""CTR-DNN on the flights: embeddings of 10, a tower of 400-400-400 and a softmax, in Fluid's own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import penstock as fluid
from flights_data import CATEGORICAL, NUMERIC

EMBEDDING_WIDTH = 10
TOWER = (400, 400, 400)
LEARNING_RATE = 1e-3
NUMERIC_FEED = "numeric"
LABEL_FEED = "late"


@dataclass(frozen=True, slots=True)
class Network:
    """The programs of one model, and the names of what is fetched from them.

    `loss`: mean cross entropy of the batch; `predict`: float32[rows, 2], on time and late.
    """

    main: Any
    startup: Any
    test: Any
    loss: str
    predict: str


def build(vocabulary_sizes: Sequence[int], *, seed: int, optimizer: Any = None, dtype: str = "float32") -> Network:
    """Record the network, its backward pass and the updates (Adam's, if no `optimizer` is given) into programs of their
    own. `seed` decides every initial value; `dtype` is that of parameters and `numeric`.
    """
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = seed
    with fluid.program_guard(main, startup):
        predict = ctr_dnn(vocabulary_sizes, dtype)
        label = fluid.layers.data(name=LABEL_FEED, shape=[1], dtype="int64")
        loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predict, label=label))
        test = main.clone(for_test=True)
        (optimizer or fluid.optimizer.Adam(learning_rate=LEARNING_RATE)).minimize(loss)
    return Network(main, startup, test, loss.name, predict.name)


def ctr_dnn(vocabulary_sizes: Sequence[int], dtype: str = "float32") -> Any:
    """Record the forward pass and return the probabilities, dtype[rows, 2]."""
    parts = [_embedding(slot, size, dtype) for slot, size in zip(CATEGORICAL, vocabulary_sizes, strict=True)]
    parts.append(fluid.layers.data(name=NUMERIC_FEED, shape=[len(NUMERIC)], dtype=dtype))
    hidden = fluid.layers.concat(parts, axis=1)
    for width in TOWER:
        hidden = fluid.layers.fc(input=hidden, size=width, act="relu")
    return fluid.layers.fc(input=hidden, size=2, act="softmax")


def _embedding(slot: str, size: int, dtype: str) -> Any:
    ids = fluid.layers.data(name=slot, shape=[1], dtype="int64")
    initializer = fluid.initializer.Normal(0.0, 0.05)
    return fluid.layers.embedding(
        input=ids,
        size=[size, EMBEDDING_WIDTH],
        is_sparse=True,
        dtype=dtype,
        param_attr=fluid.ParamAttr(name=f"{slot}.embedding", initializer=initializer),
    )


class Rows(Protocol):
    """What is fed: `categorical` int64[slots, rows], `numeric` float32[rows, features], `label` int64[rows]."""

    @property
    def categorical(self) -> Any: ...
    @property
    def numeric(self) -> Any: ...
    @property
    def label(self) -> Any: ...


def feed(batch: Rows) -> dict[str, Any]:
    """Return the batch under the names that the network's data layers have. Ids and label get a column each."""
    fed: dict[str, Any] = {slot: ids[:, None] for slot, ids in zip(CATEGORICAL, batch.categorical, strict=True)}
    return {**fed, NUMERIC_FEED: batch.numeric, LABEL_FEED: batch.label[:, None]}
