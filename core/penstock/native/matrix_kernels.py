"""Which kernel multiplies two matrices fastest: measured once for each product and machine, then remembered.

A `Product` is described by its sizes, layouts and epilogue; `Conditions` by what runs beside it. `KernelTimes` answers
from memory, then from the file (`matrix_cache`), then by measuring (`matrix_timing`). Within a process a product has
one kernel, decided under the conditions of the first executor that needs it: the same program gives the same bits,
whichever executor runs it and with how many threads. Times that another process has stored in the meantime win over
those measured here: processes that share a store choose equally for all that is in it.
Decision: another kernel than torch's is taken only if it is 3 % faster; one that fails or gives wrong results never is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)
KERNELS = ("torch", "onednn", "onednn_matmul")
"""In the order of preference. `onednn` is an operator that torch registers, `onednn_matmul` a private function."""
LEAST_GAIN = 0.03
LEAST_FLOP = 1 << 19
"""Below this (a few microseconds) the call costs more than the product, and torch's call is the cheapest."""
MOST_FLOP = 1 << 31
"""A larger product is measured on a part of it."""
MOST_ELEMENTS = 1 << 24
"""And one with a larger matrix, so that a large layer of a served model gets no second copy."""
BUDGET_S = 2.0
LOG_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Product:
    """[m, k] times [k, n] in float32, or `batch` of them. A transposed operand lies in memory as [k, m] or [n, k]."""

    m: int
    k: int
    n: int
    transpose_x: bool = False
    transpose_w: bool = False
    bias: bool = False
    activation: str = "none"
    batch: int = 0

    @property
    def flop(self) -> int:
        """Multiplications and additions."""
        return 2 * max(self.batch, 1) * self.m * self.k * self.n

    def __str__(self) -> str:
        layout = ("T" if self.transpose_x else "N") + ("T" if self.transpose_w else "N")
        sizes = "x".join(str(size) for size in (self.batch, self.m, self.k, self.n) if size)
        return f"float32 {sizes} {layout}{' bias' if self.bias else ''} {self.activation}"

    def candidates(self) -> tuple[str, ...]:
        """Return the kernels that can be the fastest for this layout.

        `onednn` has no batches and copies an operand if x lies transposed. `onednn_matmul` has no bias, and the
        same speed on an x that does not lie transposed.
        """
        if self.batch:
            return ("torch", "onednn_matmul")
        return KERNELS if self.transpose_x and not self.bias else ("torch", "onednn")

    def measured(self) -> Product:
        """Return the product that is measured in its place: the largest size halved until it is short and small."""
        sizes = {"batch": self.batch, "m": self.m, "k": self.k, "n": self.n}

        def is_long() -> bool:
            many, (m, k, n) = max(sizes["batch"], 1), (sizes[name] for name in "mkn")
            return 2 * many * m * k * n > MOST_FLOP or many * max(m * k, k * n, m * n) > MOST_ELEMENTS

        while is_long():
            largest = max(sizes, key=lambda name: sizes[name])
            sizes[largest] //= 2
        return Product(
            sizes["m"], sizes["k"], sizes["n"], self.transpose_x, self.transpose_w, self.bias, self.activation,
            sizes["batch"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conditions:
    """`at_once`: operators that run at a time, one on each replica; `intra_op`: threads of each of them."""

    at_once: int = 1
    intra_op: int = 1

    def __str__(self) -> str:
        return f"{self.at_once}x{self.intra_op} threads"


def rounded(size: int) -> int:
    """Round a size that follows the batch up to three significant binary digits: four sizes for each doubling.

    Shares of nearly the same size then take the same kernel, and odd batches are not measured again and again.
    """
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


Times = Mapping[str, float | None]
"""Seconds by kernel; None, which is not stored, for one that failed on this product or gave wrong results."""


def decide(times: Times) -> str:
    """Return the kernel to take: torch's, unless another one is faster by LEAST_GAIN."""
    best, best_s = "torch", times.get("torch")
    if best_s is None:
        return best
    for kernel in KERNELS[1:]:
        seconds = times.get(kernel)
        if seconds is not None and seconds < (1.0 - LEAST_GAIN) * best_s:
            best, best_s = kernel, seconds
    return best


def forced(product: Product, wanted: str, available: Collection[str]) -> str:
    """Return the kernel for a user's wish: torch's, or the best of oneDNN's for the layout as far as there is one."""
    if wanted == "torch":
        return wanted
    fit = [kernel for kernel in product.candidates() if kernel in available]
    return fit[-1]


class Store(Protocol):
    """Where times outlive the process: product and conditions as text -> kernel -> seconds."""

    def load(self) -> Mapping[str, Mapping[str, float]]:
        """Return what is known of this machine."""
        ...

    def add(self, found: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
        """Remember what is not known yet; return all that is known now. What was there before stays."""
        ...


Measure = Callable[[list[Product], Conditions, float, Collection[str]], dict[Product, dict[str, float | None]]]
"""Measure products by some kernels within a number of seconds; one that the time did not allow is left out."""


class KernelTimes:
    """The times of kernels, as far as they are known. Thread-safe; one thread measures at a time.

    available: returns the kernels that work on this machine; called when there is something to choose.
    """

    def __init__(
        self, store: Store, measure: Measure, available: Callable[[], Collection[str]] = lambda: KERNELS
    ) -> None:
        self._store, self._measure, self._available = store, measure, available
        self._lock = threading.Lock()
        self._decided: dict[Product, str] = {}

    def choose(self, products: list[Product], conditions: Conditions) -> dict[Product, str]:
        """Return the kernel for each product; measures what is not known, for at most about BUDGET_S seconds.

        What could not be measured in that time, and by no other process either, runs torch's kernel in this process for
        good; a later process measures it.
        """
        with self._lock:
            wanted = [p for p in dict.fromkeys(products) if p not in self._decided]
            if wanted:
                self._decide(wanted, conditions)
            return {p: self._decided[p] for p in products}

    def _decide(self, wanted: list[Product], conditions: Conditions) -> None:
        available = self._available()
        stored = self._store.load()
        known: dict[Product, Times] = {}
        for product in wanted:
            times, racing = stored.get(f"{product.measured()}, {conditions}"), _racing(product, available)
            if len(racing) == 1:
                known[product] = {}
            elif times is not None and set(times) >= racing:
                known[product] = times
        missing = list(dict.fromkeys(p.measured() for p in wanted if p not in known))
        found = self._measured(missing, conditions, available) if missing else {}
        for product in wanted:
            seen = known.get(product, found.get(f"{product.measured()}, {conditions}", {}))
            usable = {kernel: seconds for kernel, seconds in seen.items() if kernel in _racing(product, available)}
            self._decided[product] = decide(usable)

    def _measured(
        self, missing: list[Product], conditions: Conditions, available: Collection[str]
    ) -> Mapping[str, Times]:
        start = time.monotonic()
        found = self._measure(missing, conditions, BUDGET_S, available)
        took, left = time.monotonic() - start, len(missing) - len(found)
        if took > LOG_AFTER_S or left:
            later = f"; {left} more stay with torch's until another run measures them" if left else ""
            text = "measured the kernels of %d matrix products in %.1f s, which the next run knows%s"
            _log.info(text, len(found), took, later)
        stored = self._store.add({f"{p}, {conditions}": _that_worked(times) for p, times in found.items()})
        # What failed here is tried again by the next process: it may have been short of memory.
        failed = {f"{p}, {conditions}": times.keys() - _that_worked(times).keys() for p, times in found.items()}
        return {entry: {**times, **dict.fromkeys(failed.get(entry, ()))} for entry, times in stored.items()}


def _that_worked(times: Times) -> dict[str, float]:
    return {kernel: seconds for kernel, seconds in times.items() if seconds is not None}


def _racing(product: Product, available: Collection[str]) -> set[str]:
    return set(product.candidates()) & {"torch", *available}
