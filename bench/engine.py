"""`bench engine`: what the engine's scheduling costs, against the dispatcher alone and torch eager.

A *chain* is 1000 additions, each reading the one before: nothing runs in parallel, so whatever the engine adds is
visible. The floor is a C++ loop that makes the same boxed calls on the same stack (`direct`). Blocks of all
contenders alternate within one process, at least 50 of each; costs are lower quartiles, because interference on a
shared machine only ever adds. A *cross-thread edge* is what a chain costs more when every second operator is at home
on the other thread (blocks in which both threads ran). A *wide* graph is 400 independent matrix products of about
50 us; its ideal is the same calls on two bare threads, half each. Trace events are timed in a loop, beside the two
clock reads each of them holds.

`program` is the chain as a user has it: a Program that `ParallelExecutor.run` runs, nothing fed and the end fetched.
`added_us_per_operator` is the bare plan's, `program_added_us_per_operator` has all that `run` does besides.

Peers run the same chain in the same blocks: torch eager, TorchScript (traced, fusion on CPU being off), and the
original ParallelExecutor in a process of its own. *Overhead* of an executor is its whole time for an operator minus the
cheapest direct call of the same kernel in the same framework: the C++ loop for torch; for paddle, which offers none, a
Python loop over its in-place kernel, whose dispatch is then taken for kernel, in its favour. Ratios named after a peer
are of whole times, `…_overhead` are of overheads, both over `program`; `…_bare` and `…_bare_overhead` over the plan.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench._paddle_chain import PaddleChain
from bench._program_chain import ProgramChain
from bench.peers import PeerMissing
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
SMALLEST_OVERHEAD_US = 0.01


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


def script_chain(length: int, one: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the chain as a TorchScript function of its start and of what is added."""

    def chain(value: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            value = torch.add(value, added)
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is a peer because people still use it
        traced: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.jit.trace(  # type: ignore[no-untyped-call]  # torch has not typed it
            chain, (one, one), check_trace=False
        )
    return traced


@contextlib.contextmanager
def original_executor(report: Report) -> Iterator[dict[str, Callable[[], float]]]:
    """Give the contenders of paddle's process; none, with a word in the report, if its environment is missing."""
    try:
        process = PaddleChain(CHAIN)
    except PeerMissing as error:
        report.missing["paddle_pe"] = str(error)
        yield {}
        return
    with process:
        yield {"paddle_pe": process.chain, "paddle_direct": process.direct}


def measure_chain(num_blocks: int, report: Report, peers: dict[str, Callable[[], float]]) -> None:
    """Add the cost of an operator in a chain, in microseconds, to the report."""
    one = torch.ones(1)
    scripted = script_chain(CHAIN, one)
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

    program = ProgramChain(CHAIN)
    contenders: dict[str, Callable[[], float]] = {
        "direct": direct,
        "program": program.chain,
        "engine_1_thread": lambda: on(single, plan),
        "engine_2_threads": lambda: on(double, plan),
        "crossing": across,
        "torch_eager": lambda: timed(lambda: eager_chain(CHAIN, one)),
        "torch_script": lambda: timed(lambda: scripted(one, one)),
        **peers,
    }
    samples = alternating_blocks(contenders, num_blocks)
    single.close()
    double.close()
    program.close()
    samples["crossing"] = [seconds for seconds in samples["crossing"] if not math.isnan(seconds)]
    add_costs({name: 1e6 * quartiles(values)[0] / CHAIN for name, values in samples.items() if values}, report)
    report.figures["cross_thread_blocks"] = len(samples["crossing"])


def add_costs(cost: dict[str, float], report: Report) -> None:
    """Add microseconds an operator of every contender, what they are beyond the kernel, and the ratios of both."""
    for name in cost:
        if name != "crossing":
            report.figures[f"{name}_us_per_operator"] = round(cost[name], 4)
    bare, program = cost["engine_1_thread"] - cost["direct"], cost["program"] - cost["direct"]
    report.figures["added_us_per_operator"] = round(bare, 4)
    report.figures["program_added_us_per_operator"] = round(program, 4)
    report.figures["added_us_per_operator_2_threads"] = round(cost["engine_2_threads"] - cost["direct"], 4)
    if "crossing" in cost:
        report.figures["cross_thread_edge_us"] = round(cost["crossing"] - cost["engine_2_threads"], 4)
    floors = {"torch_eager": "direct", "torch_script": "direct", "paddle_pe": "paddle_direct"}
    for name, floor in floors.items():
        if name in cost:
            overhead = cost[name] - cost[floor]
            report.figures[f"{name}_overhead_us_per_operator"] = round(overhead, 4)
            for suffix, ours, added in (("", "program", program), ("_bare", "engine_1_thread", bare)):
                report.ratios[f"{name}{suffix}"] = round(cost[name] / cost[ours], 4)
                # an overhead below a clock's noise is no divisor
                report.ratios[f"{name}{suffix}_overhead"] = round(overhead / max(added, SMALLEST_OVERHEAD_US), 2)


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
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    with original_executor(report) as peers:
        measure_chain(num_blocks, report, peers)
    measure_wide(num_blocks, report)
    measure_trace(num_blocks, report)
    report.figures["blocks"] = num_blocks
    return report
