"""A small transformer that classifies sequences of symbols by which of two symbols is the more frequent one."""

from __future__ import annotations

import numpy as np

from bench.workloads.workload import Array, Workload, linear_weights

BATCH_SIZE, LENGTH, VOCABULARY = 64, 32, 1000
WIDTH, HEADS, INNER, LAYERS, CLASSES = 128, 4, 512, 2, 2


def transformer(*, num_batches: int = 100, batch_size: int = BATCH_SIZE, seed: int = 0) -> Workload:
    """Two encoder layers of 128, 4 heads and 512 inside, over 32 symbols; the mean over them, then 2 classes; Adam.

    Feeds: ids int64 [batches, rows, 32], label int64 [batches, rows, 1]. Dropout is off, so that all learn the same.
    """
    draw = np.random.default_rng(seed)
    ids = (VOCABULARY * draw.random((num_batches, batch_size, LENGTH)) ** 2).astype(np.int64)
    even = (ids % 2 == 0).sum(axis=-1, keepdims=True)
    weights: dict[str, Array] = {
        "table": draw.normal(0.0, 1.0, (VOCABULARY, WIDTH)).astype(np.float32),
        "position": draw.normal(0.0, 0.1, (LENGTH, WIDTH)).astype(np.float32),
    }
    for layer in range(LAYERS):
        weights |= linear_weights(draw, (WIDTH, 3 * WIDTH), f"in{layer}.")
        weights |= linear_weights(draw, (WIDTH, WIDTH), f"out{layer}.")
        weights |= linear_weights(draw, (WIDTH, INNER, WIDTH), f"inner{layer}.")
    weights |= linear_weights(draw, (WIDTH, CLASSES), "head.")
    # projections and inner layers of every symbol, scores and their use in attention: forward and both gradients
    a_symbol = 4 * WIDTH * WIDTH + 2 * WIDTH * INNER + 2 * LENGTH * WIDTH
    return Workload(
        "transformer",
        {"ids": ids, "label": (even > LENGTH // 2).astype(np.int64)},
        weights,
        optimizer="adam",
        learning_rate=5e-4,
        product=(batch_size * LENGTH, WIDTH, INNER),
        flops_per_sample=3.0 * 2 * LAYERS * LENGTH * a_symbol,
        loss_band=0.1,
        movement_band=0.2,
    )
