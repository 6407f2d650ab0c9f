"""`bench matrix`: the kernels of matrix products side by side, on one thread: GFLOP/s by product and kernel.

Products are those of a click-through step at 512 rows and of attention, in the layouts that training has. Kernels that
do not work on this processor are missing, with the reason. A ratio is a kernel's rate over that of torch's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch

from bench.engine import alternating_blocks, timed
from bench.report import Report
from penstock.machine.capability import capability
from penstock.native.matrix_kernels import Product
from penstock.native.matrix_probe import available, multiply, operands_of

ROUNDS = 25
TURN_FLOP = 2e9
PRODUCTS = {
    "forward_512x400x400": Product(512, 400, 400, bias=True, activation="relu"),
    "input_gradient_512x400x400": Product(512, 400, 400, transpose_w=True),
    "weight_gradient_400x512x400": Product(400, 512, 400, transpose_x=True),
    "first_weight_gradient_273x512x400": Product(273, 512, 400, transpose_x=True),
    "last_weight_gradient_400x512x2": Product(400, 512, 2, transpose_x=True),
    "attention_64x128x64x128": Product(128, 64, 128, batch=64),
    "attention_8x512x64x512": Product(512, 64, 512, batch=8),
}


def seconds_of(product: Product, kernel: str) -> Callable[[], float]:
    """Return what times one call by its mean over a turn of equal calls."""
    operands = operands_of(product, seed=1)
    num_calls = max(1, round(TURN_FLOP / 8 / product.flop))

    def turn() -> None:
        for _ in range(num_calls):
            multiply(product, kernel, operands)

    turn()  # makes primitives and memory
    return lambda: timed(turn) / num_calls


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure each product by each kernel that works here."""
    report = Report("matrix", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    for kernel in ("onednn", "onednn_matmul"):
        found = capability(f"matrix.{kernel}")
        if not found.present:
            report.missing[kernel] = found.detail
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, product in PRODUCTS.items():
            racing = [kernel for kernel in product.candidates() if kernel in available()]
            samples = alternating_blocks({kernel: seconds_of(product, kernel) for kernel in racing}, rounds)
            for kernel, seconds in samples.items():
                report.add(f"{kernel}_{name}_gflops", [product.flop / s / 1e9 for s in seconds], digits=1)
                if kernel != "torch":
                    ratios = [theirs / ours for theirs, ours in zip(samples["torch"], seconds, strict=True)]
                    report.ratios[f"{kernel}_{name}"] = round(sorted(ratios)[len(ratios) // 2], 2)
    finally:
        torch.set_num_threads(before)
    return report
