"""The ceiling: how fast the workload's main matrix product runs on all cores, and nothing else.

A step is as many products as the workload's own matrix work amounts to (by operations), so that samples per second of
this contender are the roof for the others: rate of the product in operations per second / operations per sample. The
fastest way is taken, chosen once before the first turn: PyTorch's default kernel or the wheel's oneDNN, each with all
cores inside one product or with a thread for each core and its share of the rows (as replicas and processes do it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bench.peers.contender import Options
from bench.workloads.fingerprint import Movement
from bench.workloads.workload import Workload

TRIALS, BATCH = 5, 10
Product = Callable[[Tensor, Tensor], object]


class MatrixRoof:
    """Multiplies [m, k] by [k, n]. Owned by one thread, which waits for its own ones."""

    def __init__(self, workload: Workload, *, cores: int) -> None:
        m, k, n = workload.product
        whole, right = torch.rand(m, k), torch.rand(n, k)
        self._products = workload.flops_per_sample * workload.batch_size / (2.0 * m * k * n)
        self._owed = 0.0
        self._pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
        parts = [part.clone() for part in whole.chunk(cores)]
        torch.set_num_threads(cores)

        def inside(product: Product) -> Callable[[int], None]:
            return lambda count: _repeat(product, whole, right, count)

        def beside(product: Product) -> Callable[[int], None]:
            return lambda count: self._beside(lambda part: _repeat(product, part, right, count), parts)

        kernels = [_default, _onednn] if _has_onednn() else [_default]
        ways = [way(kernel) for kernel in kernels for way in (inside, beside)]
        self._multiply = min(ways, key=_seconds)

    def _beside(self, multiply: Callable[[Tensor], None], parts: Sequence[Tensor]) -> None:
        for running in [self._pool.submit(multiply, part) for part in parts]:
            running.result()

    def run(self, num_steps: int) -> float:
        """Do the products of so many steps; part of a product is carried to the next turn. The loss is 0."""
        self._owed += self._products * num_steps
        self._multiply(int(self._owed))
        self._owed %= 1.0
        return 0.0

    def check(self) -> None:
        """Nothing is trained."""

    def movements(self) -> dict[str, Movement]:
        """There is nothing to move."""
        return {}

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _default(left: Tensor, right: Tensor) -> object:
    return torch.mm(left, right.t())


def _onednn(left: Tensor, right: Tensor) -> object:
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call] # torch has not typed it


def _repeat(product: Product, left: Tensor, right: Tensor, count: int) -> None:
    for _ in range(count):
        product(left, right)


def _seconds(multiply: Callable[[int], None]) -> float:
    best = float("inf")
    for _ in range(TRIALS):
        start = time.perf_counter()
        multiply(BATCH)
        best = min(best, time.perf_counter() - start)
    return best


def make(options: Options) -> MatrixRoof:
    """Build it."""
    return MatrixRoof(Workload.load(options.workload), cores=options.cores)
