"""Click-through workloads with several ids a slot: `bags`, CTR-DNN with 1 to 50 ids, and `ragged_slots`, many slots.

`bags` is the network of `criteo` (26 slots that share one table, 13 numbers, a tower of 400-400-400-2), with tables 16
wide, as FBGEMM needs a multiple of 4, and batches of 256. `ragged_slots` has the tables, the tower and the batches of
`slots`, with 1 to 10 ids in each of 100 slots. The rows of a slot are summed. SGD.
"""

from __future__ import annotations

import math

import numpy as np

from bench.workloads.ctr import (
    CARDINALITIES,
    NUM_DENSE,
    SKEW,
    SLOT_BATCH_SIZE,
    SLOT_ROWS,
    SLOT_TOWER,
    SLOT_WIDTHS,
    TABLE_ROWS,
    TOWER,
)
from bench.workloads.workload import Array, Workload, linear_flops, linear_weights

WIDTH, BATCH_SIZE, LONGEST = 16, 256, 50
RAGGED_SLOTS, RAGGED_LONGEST = 100, 10


def bags(
    *,
    num_batches: int = 20,
    batch_size: int = BATCH_SIZE,
    longest: int = LONGEST,
    rows: int = TABLE_ROWS,
    seed: int = 0,
) -> Workload:
    """Draw batches of 26 slots. Feeds: ids int64 [batches, rows, 26, longest], zeros behind the lengths int64
    [batches, rows, 26]; dense float32 [.., 13], label int64 [.., 1]. Memory: 53 MB of ids and a table of 64 MB."""
    draw = np.random.default_rng(seed)
    shape = (num_batches, batch_size, len(CARDINALITIES), longest)
    sizes = np.asarray(CARDINALITIES)[:, None]
    ranks = (sizes * draw.random(shape) ** SKEW).astype(np.int64)
    ids = 1 + (ranks * 2_654_435_761 + np.arange(len(CARDINALITIES))[:, None] * 40_503_003) % (rows - 1)
    table = {"table": draw.normal(0.0, 0.05, (rows, WIDTH)).astype(np.float32)}
    return _workload("bags", draw, ids, table, [WIDTH] * len(CARDINALITIES), TOWER)


def ragged_slots(
    *, num_batches: int = 20, batch_size: int = SLOT_BATCH_SIZE, num_slots: int = RAGGED_SLOTS, seed: int = 0
) -> Workload:
    """Draw batches of many slots, a table for each. Feeds as `bags` has them. Memory: 41 MB of ids."""
    draw = np.random.default_rng(seed)
    low, high = SLOT_ROWS
    widths = draw.choice(SLOT_WIDTHS, num_slots)
    heights = np.exp(draw.uniform(math.log(low), math.log(high), num_slots)).astype(np.int64)
    shape = (num_batches, batch_size, num_slots, RAGGED_LONGEST)
    ids = 1 + ((heights - 1)[:, None] * draw.random(shape) ** SKEW).astype(np.int64)
    tables: dict[str, Array] = {
        f"table{slot}": draw.normal(0.0, 0.05, (rows, width)).astype(np.float32)
        for slot, (rows, width) in enumerate(zip(heights, widths, strict=True))
    }
    return _workload("ragged_slots", draw, ids, tables, widths.tolist(), SLOT_TOWER)


def _workload(
    name: str,
    draw: np.random.Generator,
    ids: Array,
    tables: dict[str, Array],
    widths: list[int],
    tower: tuple[int, ...],
) -> Workload:
    """Draw lengths, numbers and labels, which follow from the numbers and from the first ids of some slots."""
    longest, shape = ids.shape[-1], ids.shape[:2]
    lengths = draw.integers(1, longest + 1, ids.shape[:-1])
    telling = ids[:, :, :: max(1, ids.shape[2] // 10), 0] % 2
    ids *= np.arange(longest) < lengths[..., None]
    dense = draw.random((*shape, NUM_DENSE), np.float32) ** 2
    score = dense @ draw.normal(0.0, 1.5, NUM_DENSE) + telling @ draw.normal(0.0, 1.0, telling.shape[-1])
    clicked = score - score.mean() + draw.logistic(0.0, 0.5, shape) > 0.0
    width = sum(widths) + NUM_DENSE
    return Workload(
        name,
        {"ids": ids, "lengths": lengths, "dense": dense, "label": clicked.astype(np.int64)[..., None]},
        {**tables, **linear_weights(draw, (width, *tower, 2))},
        optimizer="sgd",
        learning_rate=0.05,
        product=(shape[1], width, tower[0]),
        flops_per_sample=linear_flops(width, *tower, 2),
        loss_band=0.05,
        movement_band=0.05,
    )
