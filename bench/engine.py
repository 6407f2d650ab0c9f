"""`bench engine`: what the engine's scheduling costs, against the dispatcher alone and torch eager.

A *chain* is 1000 additions, each reading the one before: nothing runs in parallel, so whatever the engine adds is
visible. The floor is a C++ loop that makes the same boxed calls on the same stack (`direct`). Blocks of all
contenders alternate within one process, at least 50 of each; costs are lower quartiles, because interference on a
shared machine only ever adds. A *cross-thread edge* is what a chain costs more when every second operator is at home
on the other thread (blocks in which both threads ran). A *wide* graph is 400 independent matrix products of about
50 us; its ideal is the same calls on two bare threads, half each. Trace events are timed in a loop, beside the two
clock reads each of them holds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.report import Report, quartiles
from penstock.native import _engine
from penstock.native.engine import Engine, TorchPlan

ROUNDS = 9
BLOCKS_PER_ROUND = 10
MIN_BLOCKS = 50
CHAIN = 1000
WIDE = 400
OPERATOR_S = 50e-6
TRACE_EVENTS = 20_000
AT_HOME = 0.9


def chain_plan(length: int, *, alternate: bool) -> TorchPlan:
    """Build y = x + 1 + 1 …; with `alternate`, neighbours are at home on different workers."""
    plan = TorchPlan(length + 2)
    plan.keep(1)
    plan.keep(length + 1)
    for i in range(length):
        source = 0 if i == 0 else i + 1
        plan.add(
            "aten::add", "Tensor", [("slot", source), ("slot", 1)], [i + 2], i, affinity=i % 2 if alternate else -1
        )
        if i:
            plan.edge(i - 1, i)
    plan.seal()
    plan.set(1, torch.ones(1))
    return plan


def wide_plan(count: int, size: int) -> TorchPlan:
    """Build `count` independent products of the same two `size` x `size` matrices."""
    plan = TorchPlan(2)
    plan.keep(0)
    plan.keep(1)
    for i in range(count):
        plan.add("aten::mm", "", [("slot", 0), ("slot", 1)], [None], i)
    plan.seal()
    for slot in (0, 1):
        plan.set(slot, torch.rand(size, size))
    return plan


def product_size() -> int:
    """Find the matrix size whose product takes about 50 us on one thread of this machine."""
    low, high = 16, 512
    while high - low > 4:
        size = (low + high) // 2
        plan = wide_plan(1, size)
        plan.time_direct_calls(20)
        seconds = min(plan.time_direct_calls(50) / 50 for _ in range(5))
        low, high = (size, high) if seconds < OPERATOR_S else (low, size)
    return low


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def eager_chain(length: int, one: torch.Tensor) -> None:
    """Run the chain as a Python program would."""
    value = one
    with torch.no_grad():
        for _ in range(length):
            value = torch.add(value, one)


def measure_chain(num_blocks: int, report: Report) -> None:
    """Add the cost of an operator in a chain, in microseconds, to the report."""
    one = torch.ones(1)
    single = Engine(1, max_running=1, intra_op_threads=1)
    double = Engine(2, max_running=2, intra_op_threads=1)
    plan, crossing = chain_plan(CHAIN, alternate=False), chain_plan(CHAIN, alternate=True)

    def on(engine: Engine, which: TorchPlan) -> float:
        which.set(0, one)
        return timed(lambda: engine.run(which, 1))

    def across() -> float:
        double.drain()
        seconds = on(double, crossing)
        events = double.drain()
        at_home = np.mean(events["op"] % 2 == events["thread"])
        # on a busy machine the second thread may not run at all, and then nothing crosses
        return seconds if at_home >= AT_HOME else float("nan")

    def direct() -> float:
        plan.set(0, one)
        return plan.time_direct_calls(CHAIN)

    contenders: dict[str, Callable[[], float]] = {
        "direct": direct,
        "engine_1_thread": lambda: on(single, plan),
        "engine_2_threads": lambda: on(double, plan),
        "crossing": across,
        "torch_eager": lambda: timed(lambda: eager_chain(CHAIN, one)),
    }
    samples = alternating_blocks(contenders, num_blocks)
    single.close()
    double.close()
    samples["crossing"] = [seconds for seconds in samples["crossing"] if not math.isnan(seconds)]
    cost = {name: 1e6 * quartiles(values)[0] / CHAIN for name, values in samples.items() if values}
    for name in ("direct", "engine_1_thread", "engine_2_threads", "torch_eager"):
        report.figures[f"{name}_us_per_operator"] = round(cost[name], 4)
    report.figures["added_us_per_operator"] = round(cost["engine_1_thread"] - cost["direct"], 4)
    report.figures["added_us_per_operator_2_threads"] = round(cost["engine_2_threads"] - cost["direct"], 4)
    report.figures["cross_thread_blocks"] = len(samples["crossing"])
    if "crossing" in cost:
        report.figures["cross_thread_edge_us"] = round(cost["crossing"] - cost["engine_2_threads"], 4)
    report.ratios["torch_eager"] = round(cost["torch_eager"] / cost["engine_1_thread"], 4)


def alternating_blocks(contenders: dict[str, Callable[[], float]], num_blocks: int) -> dict[str, list[float]]:
    """Time every contender once in each block, after two blocks of warming up, in an order that turns round."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for block in range(num_blocks + 2):
        order = list(contenders) if block % 2 == 0 else list(reversed(contenders))
        for name in order:
            seconds = contenders[name]()
            if block >= 2:
                samples[name].append(seconds)
    return samples


def measure_wide(num_blocks: int, report: Report) -> None:
    """Add the speed-up of two threads on independent operators, and the ideal split's, to the report."""
    size = product_size()
    plan = wide_plan(WIDE, size)
    engine = Engine(2, max_running=2, intra_op_threads=1)
    contenders: dict[str, Callable[[], float]] = {
        "serial": lambda: plan.time_static_split(1),
        "split": lambda: plan.time_static_split(2),
        "engine": lambda: timed(lambda: engine.run(plan, 1)),
    }
    samples = alternating_blocks(contenders, num_blocks)
    engine.close()
    operator_us = [1e6 * seconds / WIDE for seconds in samples["serial"]]
    report.figures["wide_matrix_size"] = size
    report.add("wide_operator_us", operator_us, digits=2)
    report.add("speedup_static_split", [a / b for a, b in zip(samples["serial"], samples["split"], strict=True)])
    report.add("speedup_2_threads", [a / b for a, b in zip(samples["serial"], samples["engine"], strict=True)])
    shares = [a / b for a, b in zip(samples["split"], samples["engine"], strict=True)]
    report.ratios["static_split"] = round(report.add("share_of_static_split", shares), 4)


def measure_trace(num_blocks: int, report: Report) -> None:
    """Add the cost of a trace event, and of the two clock reads in it, in nanoseconds."""
    pairs = [_engine.time_trace_events(TRACE_EVENTS) for _ in range(num_blocks)]
    report.figures["trace_event_ns"] = round(quartiles([1e9 * event / TRACE_EVENTS for event, _ in pairs])[0], 2)
    report.figures["two_clock_reads_ns"] = round(quartiles([1e9 * reads / TRACE_EVENTS for _, reads in pairs])[0], 2)


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure everything; `rounds` of 10 blocks each, but never fewer than 50 blocks."""
    num_blocks = max(MIN_BLOCKS, rounds * BLOCKS_PER_ROUND)
    report = Report("engine", rounds)
    measure_chain(num_blocks, report)
    measure_wide(num_blocks, report)
    measure_trace(num_blocks, report)
    report.figures["blocks"] = num_blocks
    return report
