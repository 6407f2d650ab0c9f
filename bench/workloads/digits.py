"""LeNet on the digits that come with scikit-learn: 1,797 images of 8 x 8, enlarged to the 28 x 28 of LeNet."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from bench.workloads.workload import Array, Workload, linear_flops, linear_weights

BATCH_SIZE, SIZE, KERNEL = 64, 28, 5
CHANNELS = (1, 20, 50)
FEATURES = CHANNELS[2] * 4 * 4
HIDDEN, CLASSES = 500, 10


def lenet(*, batch_size: int = BATCH_SIZE, seed: int = 0) -> Workload:
    """Conv 20 and 50 of 5 x 5, each with ReLU and max-pooling by 2, then 500 and 10 (Fluid's own sizes); Adam.

    Feeds: image float32 [batches, rows, 1, 28, 28] in [-1, 1], label int64 [batches, rows, 1].
    """
    bundled: Any = load_digits()
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(bundled.target))
    order = order[: len(order) // batch_size * batch_size]
    enlarged = np.kron(bundled.images[order], np.ones((3, 3)))  # 24 x 24, then a border as in MNIST
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))) / 8.0 - 1.0
    weights: dict[str, Array] = {}
    for layer, (before, after) in enumerate(itertools.pairwise(CHANNELS)):
        deviation = (2.0 / (before * KERNEL * KERNEL)) ** 0.5
        weights[f"conv{layer}"] = draw.normal(0.0, deviation, (after, before, KERNEL, KERNEL)).astype(np.float32)
        weights[f"bias{layer}"] = np.zeros(after, np.float32)
    first, second = 24 * 24 * 25 * CHANNELS[1], 8 * 8 * 25 * CHANNELS[1] * CHANNELS[2]  # products of one image
    return Workload(
        "lenet",
        {
            "image": images.astype(np.float32).reshape(-1, batch_size, 1, SIZE, SIZE),
            "label": bundled.target[order].astype(np.int64).reshape(-1, batch_size, 1),
        },
        {**weights, **linear_weights(draw, (FEATURES, HIDDEN, CLASSES))},
        optimizer="adam",
        learning_rate=1e-3,
        product=(batch_size * 64, CHANNELS[1] * 25, CHANNELS[2]),
        flops_per_sample=2 * 2 * first + 3 * 2 * second + linear_flops(FEATURES, HIDDEN, CLASSES),
        loss_band=0.1,
        movement_band=0.2,
    )
