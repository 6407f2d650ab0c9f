"""What a step may be run with, as far as advice knows it, and the environment variables that ask a job for it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.settings import CPU_NUM, FUSE_MEMORY_SIZE, NUM_THREADS, REDUCE_STRATEGY

Exchange = Literal["all_reduce", "reduce"]

DEFAULT_BUCKET_BYTES = 1 << 16
THREADS_OF_A_REPLICA = 4
MOST_REPLICAS = 64
_NAMES: Mapping[Exchange, str] = {"all_reduce": "AllReduce", "reduce": "Reduce"}


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """How a graph is built and run. `num_threads`: 0 for four a replica, and as many at once as there are replicas.

    `bucket_bytes`: at which a bucket of gradients is full, 0 for one bucket; without effect in Reduce mode.
    """

    num_threads: int
    cpu_num: int
    exchange: Exchange
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def workers(self, cores: int) -> int:
        """Return how many operators run at once on a machine of `cores`, by the executor's rule."""
        at_once = self.num_threads or self.cpu_num
        threads = self.num_threads or THREADS_OF_A_REPLICA * self.cpu_num
        return max(1, min(at_once, threads, max(1, cores)))

    def intra_op(self, cores: int) -> int:
        """Return how many threads each operator has."""
        return max(1, cores // self.workers(cores))

    def runs_like(self, cores: int) -> tuple[int, int, Exchange, int]:
        """Return what of the setting makes a difference: of threads only how many operators run at once."""
        one = self.canonical()
        return self.workers(cores), one.cpu_num, one.exchange, one.bucket_bytes

    def canonical(self) -> Setting:
        """Return the setting without what has no effect: one replica exchanges nothing, Reduce mode has no buckets."""
        if self.cpu_num == 1:
            return replace(self, exchange="reduce", bucket_bytes=DEFAULT_BUCKET_BYTES)
        return self if self.exchange == "all_reduce" else replace(self, bucket_bytes=DEFAULT_BUCKET_BYTES)

    @property
    def name(self) -> str:
        """The setting in words: "2 threads, 2 replicas, Reduce"."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads != 1 else ''}"
        parts = [threads if self.num_threads else "default threads"]
        parts.append(f"{self.cpu_num} replica{'s' if self.cpu_num != 1 else ''}")
        if self.cpu_num > 1:
            parts.append(_NAMES[self.exchange])
        if self.cpu_num > 1 and self.exchange == "all_reduce" and self.bucket_bytes != DEFAULT_BUCKET_BYTES:
            parts.append("one bucket" if self.bucket_bytes == 0 else f"buckets of {self.bucket_bytes / 2**20:g} MB")
        return ", ".join(parts)

    def environment(self) -> dict[str, str]:
        """Return the variables that give a job this setting, whatever its script's strategies say."""
        found = {CPU_NUM.name: str(self.cpu_num), NUM_THREADS.name: str(self.num_threads)}
        if self.cpu_num > 1:
            found[REDUCE_STRATEGY.name] = _NAMES[self.exchange]
        if self.cpu_num > 1 and self.exchange == "all_reduce":
            found[FUSE_MEMORY_SIZE.name] = f"{self.bucket_bytes / 2**20:g}"
        return found


def candidates(current: Setting, *, cores: int, rows: int, reduce_only: bool = False) -> list[Setting]:
    """Return the settings worth a prediction, the current one first; of those that run alike one.

    Threads: 1, half and all of the cores; replicas: twice the cores as well, as Fluid's best practice is one of these.
    More replicas than rows have nothing to do. `rows`: of the whole batch. `reduce_only`: the program sends to
    parameter servers, so the executor runs AllReduce of several replicas as Reduce.
    """
    threads = sorted({1, max(1, cores // 2), cores})
    replicas = [n for n in sorted({*threads, 2 * cores}) if n <= min(max(1, rows), MOST_REPLICAS)]
    exchanges: tuple[tuple[Exchange, int], ...] = (
        ("reduce", DEFAULT_BUCKET_BYTES), ("all_reduce", DEFAULT_BUCKET_BYTES), ("all_reduce", 0),
    )  # fmt: skip
    if reduce_only:
        exchanges = exchanges[:1]
    found = {current.runs_like(cores): current.canonical()}
    for count, cpu_num, (exchange, bucket) in itertools.product(threads, replicas, exchanges):
        made = Setting(count, cpu_num, exchange, bucket).canonical()
        found.setdefault(made.runs_like(cores), made)
    return list(found.values())
