"""Click-through workloads: two that are drawn, `criteo` and `slots`, and the real flights of the example.

`criteo` is the network and the sizes of Fluid's CTR-DNN example: 26 slots that share one table [1000001, 10] drawn from
Uniform(-1, 1), 13 numbers, a tower of 400-400-400-2 drawn from N(0, 1 / sqrt(inputs)), batches of 1000. It differs in
two things: the loss is the mean over rows, not the sum, and the optimizer is SGD, so that all peers support both. Ids
are drawn with a power law over as many values as each of Criteo's columns has, and hashed into the shared table.

`slots` has the shape of a production network: 300 slots with a table each, of dimensions 4, 8, 12 and 16 and of 100 to
50,000 rows (logarithms uniform), 13 numbers, a small tower of 64-32-2, batches of 256, SGD.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from bench.workloads.workload import Array, Workload, linear_flops, linear_weights

TABLE_ROWS, WIDTH, NUM_DENSE, BATCH_SIZE = 1_000_001, 10, 13, 1000
TOWER = (400, 400, 400)
# distinct values of C1 … C26 in Criteo's Kaggle data
CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
SKEW = 3.0
SLOTS, SLOT_WIDTHS, SLOT_ROWS, SLOT_BATCH_SIZE = 300, (4, 8, 12, 16), (100, 50_000), 256
SLOT_TOWER = (64, 32)


def criteo(*, num_batches: int = 100, batch_size: int = BATCH_SIZE, rows: int = TABLE_ROWS, seed: int = 0) -> Workload:
    """Draw Criteo-shaped batches. Feeds: ids int64 [batches, rows, 26], dense float32 [.., 13], label int64 [.., 1].

    The label follows from the numbers and two columns, with noise, so that there is something to learn.
    Time: about a second; memory: 21 MB of ids and a table of 40 MB.
    """
    draw = np.random.default_rng(seed)
    shape = (num_batches, batch_size)
    ranks = [(size * draw.random(shape) ** SKEW).astype(np.int64) for size in CARDINALITIES]
    hashed = [(rank * 2_654_435_761 + column * 40_503_003) % rows for column, rank in enumerate(ranks)]
    dense = draw.random((*shape, NUM_DENSE), np.float32) ** 2
    score = dense @ draw.normal(0.0, 1.5, NUM_DENSE) + 0.8 * (ranks[0] % 2) - 0.8 * (ranks[5] % 2)
    clicked = score - score.mean() + draw.logistic(0.0, 0.5, shape) > 0.0
    width = len(CARDINALITIES) * WIDTH + NUM_DENSE
    return Workload(
        "criteo",
        {"ids": np.stack(hashed, axis=-1), "dense": dense, "label": clicked.astype(np.int64)[..., None]},
        {
            "table": draw.uniform(-1.0, 1.0, (rows, WIDTH)).astype(np.float32),
            **linear_weights(draw, (width, *TOWER, 2)),
        },
        optimizer="sgd",
        learning_rate=0.05,
        product=(batch_size, TOWER[0], TOWER[1]),
        flops_per_sample=linear_flops(width, *TOWER, 2),
        loss_band=0.02,
        movement_band=0.05,
    )


def slots(
    *, num_batches: int = 100, batch_size: int = SLOT_BATCH_SIZE, num_slots: int = SLOTS, seed: int = 0
) -> Workload:
    """Draw batches of many slots, a table for each. Feeds as `criteo` has them; ids follow a power law in each slot.

    Widths and rows of the tables are drawn from the seed too. Memory: 61 MB of ids, and 110 MB of tables.
    """
    draw = np.random.default_rng(seed)
    low, high = SLOT_ROWS
    widths = draw.choice(SLOT_WIDTHS, num_slots)
    heights = np.exp(draw.uniform(math.log(low), math.log(high), num_slots)).astype(np.int64)
    shape = (num_batches, batch_size)
    ids = (heights * draw.random((*shape, num_slots)) ** SKEW).astype(np.int64)
    dense = draw.random((*shape, NUM_DENSE), np.float32) ** 2
    telling = ids[..., :: max(1, num_slots // 10)] % 2
    score = dense @ draw.normal(0.0, 1.5, NUM_DENSE) + telling @ draw.normal(0.0, 1.0, telling.shape[-1])
    clicked = score - score.mean() + draw.logistic(0.0, 0.5, shape) > 0.0
    tables: dict[str, Array] = {
        f"table{slot}": draw.normal(0.0, 0.05, (rows, width)).astype(np.float32)
        for slot, (rows, width) in enumerate(zip(heights, widths, strict=True))
    }
    width = int(widths.sum()) + NUM_DENSE
    return Workload(
        "slots",
        {"ids": ids, "dense": dense, "label": clicked.astype(np.int64)[..., None]},
        {**tables, **linear_weights(draw, (width, *SLOT_TOWER, 2))},
        optimizer="sgd",
        learning_rate=0.05,
        product=(batch_size, width, SLOT_TOWER[0]),
        flops_per_sample=linear_flops(width, *SLOT_TOWER, 2),
        loss_band=0.05,
        movement_band=0.05,
    )


def flights(*, num_batches: int = 300, batch_size: int = BATCH_SIZE, seed: int = 0) -> Workload:
    """Cut the example's training flights into full batches: a table for each slot, Adam at the example's rate.

    Feeds as `criteo` has them. Raises UserError if the data package is missing.
    """
    # an example is a folder of scripts, not an installed package, and needs pandas
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "ctr_flights"))
    import flights_data

    data = flights_data.load()
    cut = [
        rows
        for rows in flights_data.batches(data.train, batch_size, seed=seed, pass_index=0)
        if rows.num_rows == batch_size
    ][:num_batches]
    draw = np.random.default_rng(seed)
    tables: dict[str, Array] = {
        f"table{slot}": draw.normal(0.0, 0.05, (size, WIDTH)).astype(np.float32)
        for slot, size in enumerate(data.vocabulary_sizes)
    }
    width = len(tables) * WIDTH + data.train.numeric.shape[1]
    return Workload(
        "flights",
        {
            "ids": np.stack([rows.categorical.T for rows in cut]).copy(),
            "dense": np.stack([rows.numeric for rows in cut]),
            "label": np.stack([rows.label[:, None] for rows in cut]),
        },
        {**tables, **linear_weights(draw, (width, *TOWER, 2))},
        optimizer="adam",
        learning_rate=1e-3,
        product=(batch_size, TOWER[0], TOWER[1]),
        flops_per_sample=linear_flops(width, *TOWER, 2),
        loss_band=0.1,
        movement_band=0.2,
    )
