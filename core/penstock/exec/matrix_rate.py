"""What one thread multiplies in float32: the rate that the dashboard compares a step with."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.native.intra_op import use_intra_op_threads_here

SIZE = 384
TRIES = 12
"""The fastest counts: interference only adds. Some 20 ms together."""


@functools.cache
def matrix_gflops() -> float:
    """Return 10^9 floating-point operations a second of a matmul of `SIZE`, by one thread. Measured once a process."""
    # A thread of its own, since the number of threads within an operator is a setting of the calling thread.
    with ThreadPoolExecutor(1, "penstock-matrix-rate", use_intra_op_threads_here, (1,)) as one:
        return one.submit(_measured).result()


def _measured() -> float:
    x = torch.ones(SIZE, SIZE, dtype=torch.float32, device="cpu")
    result = torch.empty_like(x)
    best_ns = None
    with torch.inference_mode():
        for _ in range(TRIES):
            began_ns = time.perf_counter_ns()
            torch.mm(x, x, out=result)
            taken_ns = time.perf_counter_ns() - began_ns
            best_ns = taken_ns if best_ns is None else min(best_ns, taken_ns)
    return 2.0 * SIZE**3 / max(1, best_ns or 0)
