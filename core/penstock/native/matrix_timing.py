"""Measure the kernels of matrix products as they will run: on the engine, with as many of them at once.

Each kernel runs in a plan of its own: on every replica a chain of equal products on operands of the replica's own.
Kernels take turns; the time of a kernel is the lower quartile of its calls, from the engine's own trace: a process that
comes between does not count, nor does a call that ran while the other core was idle. Operands are warm, as in a step.
A kernel that fails on a product, or differs from torch's beyond rounding, takes no part; a warning gives the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.logger import warn_once
from penstock.native.engine import Engine, TorchPlan
from penstock.native.matrix_kernels import Conditions, Product
from penstock.native.matrix_probe import Multiply, Operands, multiply, operands_of, why_wrong

_log = logging.getLogger(__name__)
PER_PRODUCT_S = 0.05
_TURN_S = 0.001
_LEAST_TURNS, _MOST_TURNS = 3, 16
_LONGEST_CHAIN = 32


def measure(
    products: list[Product],
    conditions: Conditions,
    budget_s: float,
    available: Collection[str],
    *,
    by: Multiply = multiply,
) -> dict[Product, dict[str, float | None]]:
    """Return seconds by kernel for each product, the longest products first; those beyond the budget are left out.

    None in the place of seconds: the kernel fails on this product or gives wrong results; a warning says why.
    `by`: how one product is made for that comparison.
    Cost: PER_PRODUCT_S for each product, or five turns where those take longer. Threads of its own; torch's allocator.
    """
    found: dict[Product, dict[str, float | None]] = {}
    stop = time.monotonic() + budget_s
    engine = Engine(conditions.at_once, max_running=conditions.at_once, intra_op_threads=conditions.intra_op)
    try:
        for product in sorted(products, key=lambda p: p.flop, reverse=True):
            if time.monotonic() >= stop:
                break
            operands = [operands_of(product, seed) for seed in range(conditions.at_once)]
            left_out = _left_out(product, available, operands[0], by)
            racing = [k for k in product.candidates() if k in available and k not in left_out]
            found[product] = {**_times(engine, product, racing, operands, stop), **dict.fromkeys(left_out)}
            for kernel, why in left_out.items():
                warn_once(_log, f"the matrix kernel {kernel} is left out for {product}: {why}", engine, about=kernel)
    finally:
        engine.close()
    return found


def _left_out(product: Product, available: Collection[str], operands: Operands, by: Multiply) -> dict[str, str]:
    """Return the kernels that fail on a product or give wrong results, with the reason."""
    others = [k for k in product.candidates() if k in available and k != "torch"]
    reasons = {kernel: why_wrong(product, kernel, operands, by) for kernel in others}
    return {kernel: why for kernel, why in reasons.items() if why}


@dataclass(slots=True)
class _Race:
    """One kernel: its plan and what its calls took."""

    plan: TorchPlan
    spent_ns: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The lower quartile of the calls."""
        return max(sorted(self.spent_ns)[len(self.spent_ns) // 4], 1) * 1e-9


def _times(
    engine: Engine, product: Product, racing: list[str], operands: list[Operands], stop: float
) -> dict[str, float]:
    races = {kernel: _Race(_plan(product, kernel, operands, 1)) for kernel in racing}
    end = min(time.monotonic() + PER_PRODUCT_S, stop)
    for race in races.values():
        _turn(engine, race)  # the first call makes primitives and memory
        race.spent_ns.clear()
        _turn(engine, race)
    for kernel, race in races.items():
        length = max(1, min(_LONGEST_CHAIN, round(_TURN_S / race.seconds)))
        races[kernel] = _Race(_plan(product, kernel, operands, length))
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and time.monotonic() >= end:
            break
        for race in races.values():
            _turn(engine, race)
    return {kernel: race.seconds for kernel, race in races.items()}


def _turn(engine: Engine, race: _Race) -> None:
    engine.drain()
    engine.run(race.plan, 0)
    race.spent_ns.extend(engine.drain()["duration_ns"].tolist())


def _plan(product: Product, kernel: str, operands: list[Operands], length: int) -> TorchPlan:
    """Return a plan of one chain a replica. Its results are dropped at once."""
    plan = TorchPlan(num_slots=3 * len(operands))
    for replica, (_, _, bias) in enumerate(operands):
        slots = [3 * replica + i for i in range(3)]
        arguments: list[tuple[str, object]] = [
            ("slot", slots[0]), ("slot", slots[1]), ("const", None) if bias is None else ("slot", slots[2]),
            ("const", product.transpose_x), ("const", product.transpose_w), ("const", product.activation),
            ("const", kernel),
        ]  # fmt: skip
        before = -1
        for _ in range(length):
            index = plan.add("penstock::product", "", arguments, [None], 0, affinity=replica)
            if before >= 0:
                plan.edge(before, index)
            before = index
        for slot in slots:
            plan.keep(slot)
    plan.seal()
    for replica, tensors in enumerate(operands):
        for position, tensor in enumerate(tensors):
            if tensor is not None:
                plan.set(3 * replica + position, tensor)
    return plan
