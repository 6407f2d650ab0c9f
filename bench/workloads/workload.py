"""One workload: the batches that every contender is fed, in their order, and the values that all start from.

Invariant: plain numpy arrays, so that a process without torch can read them (`load`) and no contender has a generator
of its own. Weights of linear layers are [inputs, outputs]; each framework turns them as it likes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_FEED, _WEIGHT, _REST = "feed.", "weight.", "rest"


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of equal size and initial values.

    `feeds`: each [batches, rows, …]. `history`, [batches, rows, clicks, …] padded with zeros, is cut to the longest
    one of a batch. `lengths`, [batches, rows, slots], says how many of the ids [batches, rows, slots, …] a slot has;
    those behind are zeros. `optimizer`: "sgd" or "adam" (sparse tables: lazily). `product`: (m, k, n) of the
    matrix product in which most of the time goes. `flops_per_sample`: of the matrix products and convolutions of one
    training step. `loss_band`: how far the last losses of two contenders may lie apart; `movement_band`: how far, as a
    share, what training has moved a weight by.
    """

    name: str
    feeds: Mapping[str, Array]
    weights: Mapping[str, Array]
    optimizer: str
    learning_rate: float
    product: tuple[int, int, int]
    flops_per_sample: float
    loss_band: float
    movement_band: float

    @property
    def num_batches(self) -> int:
        return len(next(iter(self.feeds.values())))

    @property
    def batch_size(self) -> int:
        return int(next(iter(self.feeds.values())).shape[1])

    def batch(self, step: int) -> dict[str, Array]:
        """Return the feeds of a step, counted from 0; after the last batch comes the first one again. Views."""
        batch = {name: values[step % self.num_batches] for name, values in self.feeds.items()}
        if "history" in batch:
            clicks = batch["history"]
            batch["history"] = clicks[:, : int(clicks.any(axis=(0, 2)).sum())]
        return batch

    def bags(self, step: int) -> list[tuple[Array, Array]]:
        """Return (ids, lengths) of each slot of a step, int64 [ids] and [rows]: row after row, without what pads."""
        batch = self.batch(step)
        ids, lengths = batch["ids"], batch["lengths"]
        own = np.arange(ids.shape[-1]) < lengths[..., None]
        return [(ids[:, slot][own[:, slot]], lengths[:, slot].copy()) for slot in range(lengths.shape[1])]

    def save(self, path: Path) -> None:
        """Write everything to one file."""
        rest = [self.name, self.optimizer, self.learning_rate, self.product, self.flops_per_sample]
        rest += [self.loss_band, self.movement_band]
        arrays = {_FEED + name: values for name, values in self.feeds.items()}
        arrays |= {_WEIGHT + name: values for name, values in self.weights.items()}
        np.savez(path, **{_REST: np.array(json.dumps(rest)), **arrays})  # type: ignore[arg-type]  # names are free

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as kept:
            name, optimizer, rate, product, flops_per_sample, *bands = json.loads(str(kept[_REST]))
            feeds = {key.removeprefix(_FEED): kept[key] for key in kept.files if key.startswith(_FEED)}
            weights = {key.removeprefix(_WEIGHT): kept[key] for key in kept.files if key.startswith(_WEIGHT)}
        m, k, n = product
        return cls(name, feeds, weights, optimizer, rate, (m, k, n), flops_per_sample, *bands)


def linear_flops(*sizes: int) -> float:
    """Return the operations of a tower of linear layers for one row: forward, and both gradients."""
    return float(sum(3 * 2 * before * after for before, after in itertools.pairwise(sizes)))


def linear_weights(draw: np.random.Generator, sizes: tuple[int, ...], prefix: str = "") -> dict[str, Array]:
    """Draw weights from N(0, 1 / sqrt(inputs)) and set biases to zero, as `<prefix>w0`, `<prefix>b0` and so on."""
    made: dict[str, Array] = {}
    for layer, (before, after) in enumerate(itertools.pairwise(sizes)):
        made[f"{prefix}w{layer}"] = draw.normal(0.0, before**-0.5, (before, after)).astype(np.float32)
        made[f"{prefix}b{layer}"] = np.zeros(after, np.float32)
    return made
