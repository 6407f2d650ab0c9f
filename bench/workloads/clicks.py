"""Attention over click histories: a Deep Interest Network (Zhou et al., 2018) on drawn items and their categories.

A row has a target and up to 50 clicks, each an item and its category. Histories are padded with zeros to the longest
one of their batch, so that sizes differ from batch to batch; lengths are geometric around 8. Of a padded position
neither the score nor the gradient counts. `fluid` networks and torch modules build it from `weights`: `a…` is the
attention's tower, `w…` and `b…` the one that follows.
"""

from __future__ import annotations

import numpy as np

from bench.workloads.workload import Array, Workload, linear_flops, linear_weights

BATCH_SIZE, LONGEST, MEAN_LENGTH = 256, 50, 8
ITEMS, CATEGORIES, WIDTH = 50_001, 801, 16
ATTENTION, TOWER = (80, 40, 1), (80, 40, 2)
SKEW = 3.0


def din(*, num_batches: int = 100, batch_size: int = BATCH_SIZE, longest: int = LONGEST, seed: int = 0) -> Workload:
    """Draw batches. Feeds: target int64 [batches, rows, 2], history int64 [batches, rows, longest, 2], label [.., 1].

    Items are numbered from 1 by a power law, each in one category; 0 is padding. A click follows from how many clicks
    of the history are in the target's category, with noise.
    """
    draw = np.random.default_rng(seed)
    category = draw.integers(1, CATEGORIES, ITEMS)
    category[0] = 0

    def items(*shape: int) -> Array:
        return 1 + ((ITEMS - 1) * draw.random(shape) ** SKEW).astype(np.int64)

    history, target = items(num_batches, batch_size, longest), items(num_batches, batch_size)
    liked = draw.random((num_batches, batch_size)) < 0.5
    target = np.where(liked, history[..., 0], target)
    lengths = np.minimum(draw.geometric(1.0 / MEAN_LENGTH, (num_batches, batch_size)), longest)
    history *= np.arange(longest) < lengths[..., None]
    same = (category[history] == category[target][..., None]).mean(axis=-1) > 0
    clicked = 2.0 * same - 1.0 + draw.logistic(0.0, 0.5, same.shape) > 0.0
    width = 2 * WIDTH
    weights: dict[str, Array] = {
        "table0": draw.normal(0.0, 0.1, (ITEMS, WIDTH)).astype(np.float32),
        "table1": draw.normal(0.0, 0.1, (CATEGORIES, WIDTH)).astype(np.float32),
        **linear_weights(draw, (4 * width, *ATTENTION), "a."),
        **linear_weights(draw, (3 * width, *TOWER)),
    }
    del weights["a.b2"]  # a softmax does not change when all scores do: its gradient is rounding
    padded = float(np.mean((history != 0).any(axis=1).sum(axis=-1)))
    return Workload(
        "din",
        {
            "target": np.stack([target, category[target]], axis=-1),
            "history": np.stack([history, category[history]], axis=-1),
            "label": clicked.astype(np.int64)[..., None],
        },
        weights,
        optimizer="sgd",
        learning_rate=0.05,
        product=(batch_size * round(padded), 4 * width, ATTENTION[0]),
        flops_per_sample=padded * (linear_flops(4 * width, *ATTENTION) + 6 * width) + linear_flops(3 * width, *TOWER),
        loss_band=0.05,
        movement_band=0.05,
    )
