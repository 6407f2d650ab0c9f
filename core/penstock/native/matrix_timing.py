"""Measure the kernels of matrix products as they will run: on the engine, with as many of them at once.

Each kernel runs in a plan of its own: on every replica a chain of equal products on operands of the replica's own.
Kernels take turns; the time of a kernel is the lower quartile of its calls, from the engine's own trace: a process that
comes between does not count, nor does a call that ran while the other core was idle. Operands are warm, as in a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from penstock.native import fused_ops as _registered  # noqa: F401 - registers penstock.product
from penstock.native.engine import Engine, TorchPlan
from penstock.native.matrix_kernels import KERNELS, Conditions, Product

PER_PRODUCT_S = 0.05
_TURN_S = 0.001
_LEAST_TURNS, _MOST_TURNS = 3, 16
_LONGEST_CHAIN = 32


def measure(products: list[Product], conditions: Conditions, budget_s: float) -> dict[Product, dict[str, float]]:
    """Return seconds by kernel for each product, the longest products first; those beyond the budget are left out.

    Cost: PER_PRODUCT_S for each product, or five turns where those take longer. Threads of its own; torch's allocator.
    """
    found: dict[Product, dict[str, float]] = {}
    stop = time.monotonic() + budget_s
    engine = Engine(conditions.at_once, max_running=conditions.at_once, intra_op_threads=conditions.intra_op)
    try:
        for product in sorted(products, key=lambda p: p.flop, reverse=True):
            if time.monotonic() >= stop:
                break
            found[product] = _times(engine, product, conditions, stop)
    finally:
        engine.close()
    return found


@dataclass(slots=True)
class _Race:
    """One kernel: its plan and what its calls took."""

    plan: TorchPlan
    spent_ns: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The lower quartile of the calls."""
        return max(sorted(self.spent_ns)[len(self.spent_ns) // 4], 1) * 1e-9


def _times(engine: Engine, product: Product, conditions: Conditions, stop: float) -> dict[str, float]:
    operands = [_operands(product, seed) for seed in range(conditions.at_once)]
    races = {kernel: _Race(_plan(product, kernel, operands, 1)) for kernel in KERNELS}
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


def _operands(product: Product, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    batch = [product.batch] if product.batch else []
    x = [product.k, product.m] if product.transpose_x else [product.m, product.k]
    w = [product.n, product.k] if product.transpose_w else [product.k, product.n]
    bias = torch.randn(product.n, generator=generator) if product.bias else None
    return torch.randn(batch + x, generator=generator), torch.randn(batch + w, generator=generator), bias


def _plan(
    product: Product, kernel: str, operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], length: int
) -> TorchPlan:
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
