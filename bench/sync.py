"""`bench sync`: two replicas' gradients in one process until both hold the sum, against Gloo and the copy rate.

`penstock` is one `all_reduce_` instruction, run by the engine as a step's exchange is: two workers, one intra-op
thread each, the call from Python included. So it is one thread's work; `penstock_halves` are two instructions of half
the bytes each, as when a step has several exchanges ready and no replica computes. Gloo is
`torch.distributed.all_reduce` between two processes over loopback, one thread each, from the later one's call until
the later one holds the sum.

Bytes: an exchange reads both gradients and writes both, 4 n for gradients of n bytes; a copy of n bytes moves 2 n. The
copy is `aten::copy_` between the same two buffers, on as many bare threads as the exchange has. It reads each line
that it is going to overwrite, the exchange does not, so a share of the copy rate may be above 1.

`program` is the exchange inside a training step: a parameter of 32 MiB, two replicas, the durations of its
all-reduce handles from the trace, first begin to last end.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import penstock as fluid
import penstock.native.ops  # registers all_reduce_
from bench._environment import variable_set
from bench._gloo import GlooPair
from bench._sized_graph import sized_graph
from bench.engine import alternating_blocks, timed
from bench.report import Report, quartiles
from penstock.native.engine import Engine, TorchPlan

ROUNDS = 9
MIB = 1 << 20
SIZES_MIB = (1, 8, 32)
NUM_REPLICAS = 2
WIDTH = 2896  # squared, times 4 bytes: the largest square below 32 MiB
REPEATS = 5
PROGRAM_STEPS = 20


def exchange_plan(gradients: list[Tensor], parts: int) -> TorchPlan:
    """Build the exchange of `gradients` (one a replica, same size) as `parts` independent instructions."""
    plan = TorchPlan(parts * len(gradients))
    for part in range(parts):
        slots = [part * len(gradients) + replica for replica in range(len(gradients))]
        plan.add("penstock::all_reduce_", "", [("slots", slots)], [], part, affinity=part)
        for slot in slots:
            plan.keep(slot)
    plan.seal()
    for replica, gradient in enumerate(gradients):
        for part, piece in enumerate(gradient.chunk(parts)):
            plan.set(part * len(gradients) + replica, piece)
    return plan


def copy_plan(source: Tensor, target: Tensor, parts: int) -> TorchPlan:
    """Build REPEATS copies of each of `parts` pieces, piece by piece, so that a static split has one piece a thread."""
    plan = TorchPlan(2 * parts)
    for part in range(parts):
        plan.keep(2 * part)
        plan.keep(2 * part + 1)
        for _ in range(REPEATS):
            plan.add("aten::copy_", "", [("slot", 2 * part + 1), ("slot", 2 * part), ("const", False)], [None], part)
    plan.seal()
    for part, (read, written) in enumerate(zip(source.chunk(parts), target.chunk(parts), strict=True)):
        plan.set(2 * part, read)
        plan.set(2 * part + 1, written)
    return plan


def check_sum(engine: Engine, parts: int) -> None:
    """Raise RuntimeError unless the measured plan leaves the sum in both gradients: a fast wrong answer is none."""
    first, second = torch.rand(1000), torch.rand(1000)
    expected = first + second
    engine.run(exchange_plan([first, second], parts), 1)
    if not (torch.equal(first, expected) and torch.equal(second, expected)):
        raise RuntimeError("the exchange did not leave the sum on both replicas")


def measure_size(size_mib: int, num_rounds: int, engine: Engine, gloo: GlooPair, report: Report) -> None:
    """Add the figures of gradients of `size_mib` to the report."""
    num_elements = size_mib * MIB // 4
    gradients = [torch.zeros(num_elements) for _ in range(NUM_REPLICAS)]
    whole, halves = exchange_plan(gradients, 1), exchange_plan(gradients, 2)
    copies = {threads: copy_plan(gradients[0], gradients[1], threads) for threads in (1, 2)}

    def exchange(plan: TorchPlan) -> float:
        return statistics.median(timed(lambda: engine.run(plan, 1)) for _ in range(REPEATS))

    contenders: dict[str, Callable[[], float]] = {
        "penstock": lambda: exchange(whole),
        "penstock_halves": lambda: exchange(halves),
        "gloo": lambda: statistics.median(gloo.all_reduce(size_mib * MIB, REPEATS)),
        "copy_1_thread": lambda: copies[1].time_static_split(1) / REPEATS,
        "copy_2_threads": lambda: copies[2].time_static_split(2) / REPEATS,
    }
    samples = alternating_blocks(contenders, num_rounds)
    for name in ("penstock", "penstock_halves", "gloo"):
        report.add(f"{name}_{size_mib}mb_ms", [1e3 * s for s in samples[name]])
    for threads, ours in ((1, "penstock"), (2, "penstock_halves")):
        copy = f"copy_{threads}_thread{'s' if threads > 1 else ''}"
        report.add(f"{copy}_{size_mib}mb_gb_per_s", [2e-9 * size_mib * MIB / s for s in samples[copy]], digits=1)
        moved = [4e-9 * size_mib * MIB / s for s in samples[ours]]
        report.add(f"{ours}_{size_mib}mb_gb_per_s", moved, digits=1)
        shares = [2 * c / s for c, s in zip(samples[copy], samples[ours], strict=True)]
        report.ratios[f"{copy}_{size_mib}mb"] = round(quartiles(shares)[1], 3)
    all_cores = [2 * c / s for c, s in zip(samples["copy_2_threads"], samples["penstock"], strict=True)]
    report.add(f"share_of_both_cores_copy_{size_mib}mb", all_cores, digits=3)
    for name, key in (("penstock", "gloo"), ("penstock_halves", "gloo_by_halves")):
        ratios = [g / s for g, s in zip(samples["gloo"], samples[name], strict=True)]
        report.ratios[f"{key}_{size_mib}mb"] = round(report.add(f"{key}_ratio_{size_mib}mb", ratios, digits=2), 2)


def training(width: int) -> tuple[fluid.ParallelExecutor, dict[str, Tensor]]:
    """Build one `width` x `width` product trained by SGD in AllReduce mode on two replicas, and its feed."""
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[width], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.fc(input=x, size=width, bias_attr=False))
        fluid.optimizer.SGD(learning_rate=1e-3).minimize(loss)
    scope = fluid.Scope()
    fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
    executor = fluid.ParallelExecutor(use_cuda=False, loss_name=loss.name, main_program=main, scope=scope)
    return executor, {"x": torch.rand(2 * NUM_REPLICAS, width)}


def measure_program(num_steps: int, width: int, report: Report) -> None:
    """Add how long the exchange takes inside a training step, and how many threads ran it."""
    with variable_set("CPU_NUM", str(NUM_REPLICAS)):
        executor, feed = training(width)
    core = executor.core
    graph, _ = sized_graph(core, feed)
    exchanges = [handle.index for handle in graph.handles if handle.kind == "all_reduce"]
    executor.run(fetch_list=[], feed=feed)
    times_ms, threads = [], []
    for _ in range(num_steps):
        core.engine.drain()
        executor.run(fetch_list=[], feed=feed)
        events = core.engine.drain()
        ours = [int(op) in exchanges for op in events["op"]]
        begin, duration = events["start_ns"][ours], events["duration_ns"][ours]
        times_ms.append(float((begin + duration).max() - begin.min()) / 1e6)
        threads.append(len(set(events["thread"][ours].tolist())))
    executor.close()
    report.figures["program_gradient_bytes"] = width * width * 4
    report.figures["program_exchange_handles"] = len(exchanges)
    report.figures["program_exchange_threads"] = round(statistics.mean(threads), 2)
    report.add("program_exchange_ms", times_ms)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MIB), help="MiB a gradient (%(default)s)")
    parser.add_argument("--width", type=int, default=WIDTH, help="side of the Program's parameter (%(default)s)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure each size, then the exchange inside a Program."""
    report = Report("sync", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    engine = Engine(NUM_REPLICAS, max_running=NUM_REPLICAS, intra_op_threads=1)
    for parts in (1, 2):
        check_sum(engine, parts)
    with GlooPair() as gloo:
        for size_mib in extra.sizes:
            measure_size(size_mib, rounds, engine, gloo, report)
    engine.close()
    measure_program(PROGRAM_STEPS, extra.width, report)
    return report
