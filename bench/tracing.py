"""`bench tracing`: what the always-on trace costs, an event and a training step, with torch.profiler beside it.

* An *event* in a loop, beside the two clock reads in it; events of a step times that cost, over the step's time.
* *Pairs*: blocks of the same steps in the same engine with the trace on and off (`Engine.set_tracing`, which exists for
  this), interleaved, the order turned round after each pair. The result is the median of the pairs' ratios, its 95 %
  confidence interval, by bootstrap over pairs. For CTR-DNN, and for the worst that can be: a chain of additions of one
  element, 1000 operators of half a microsecond.
* *Watched*: the same with and without a session that drains the trace ten times a second, samples steps and sends
  frames to an agent's socket, whose end is a process that reads and forgets.
* *Fed*: passes over a QueueDataset, both watched, with and without records of the data feed's work
  (`penstock.telemetry.input`), for CTR-DNN and for a program of one small layer in batches of 16.
* *torch.profiler* on PyTorch eager of the same model: blocks inside a profile of CPU activity and outside of any.
  Starting, stopping and processing the profile is not counted.

A ratio of 1.00 is a tracer that costs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench._environment import variable_set
from bench._fed import passes
from bench._sized_graph import sized_graph
from bench._socket_sink import SocketSink
from bench.engine import CHAIN, MIN_BLOCKS, chain_plan, measure_trace, timed
from bench.models import modules, programs
from bench.report import Report
from bench.workloads import Workload, criteo
from penstock.native.engine import Engine
from penstock.protocol.contract import Managed
from penstock.telemetry.sessions import Watched

ROUNDS = 9
NUM_REPLICAS = 2
NUM_RESAMPLES = 4000
PAIRS_PER_ROUND = {"ctr": 12, "chain": 60, "watched": 2, "fed": 2, "profiled": 3}
STEPS_OF_A_BLOCK = {"ctr": 2, "chain": 10, "watched": 30, "profiled": 10}

Block = Callable[[], float]
"""Runs some steps and returns their seconds."""


def paired_ratios(one: Block, other: Block, num_pairs: int) -> list[float]:
    """Run both interleaved and return, for each pair, the time of `one` over that of `other`. The order alternates."""
    ratios = []
    one(), other()  # warm up
    for pair in range(num_pairs):
        if pair % 2 == 0:
            first = one()
            ratios.append(first / other())
        else:
            second = other()
            ratios.append(one() / second)
    return ratios


def confidence(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by bootstrap over pairs. Deterministic."""
    values = np.asarray(ratios)
    draw = np.random.default_rng(0).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[draw], axis=1), (2.5, 97.5))
    return float(low), float(high)


def add_pairs(report: Report, name: str, ratios: Sequence[float]) -> float:
    """Add the median ratio, its quartiles and its confidence interval; return the median."""
    middle = report.add(name, ratios)
    low, high = confidence(ratios)
    report.figures[f"{name}_ci95_low"], report.figures[f"{name}_ci95_high"] = round(low, 4), round(high, 4)
    report.figures[f"{name}_pairs"] = len(ratios)
    return middle


class Training:
    """CTR-DNN as `bench ctr` runs it: two replicas, Reduce."""

    def __init__(self, workload: Workload) -> None:
        with variable_set("CPU_NUM", str(NUM_REPLICAS)):
            self.executor, _, feeds = programs.trainer(workload, build=programs.strategy("reduce"))
        self.batch_size = workload.batch_size
        self.feeds = itertools.cycle(feeds)

    def steps(self, count: int) -> float:
        """Train `count` steps without fetching and return their seconds."""
        begin = time.perf_counter()
        for _ in range(count):
            self.executor.run(fetch_list=[], feed=next(self.feeds))
        return time.perf_counter() - begin

    def traced(self, count: int, *, on: bool) -> float:
        """The same with the trace on or off."""
        self.executor.core.engine.set_tracing(on=on)
        seconds = self.steps(count)
        self.executor.core.engine.set_tracing(on=True)
        return seconds

    def watched(self, count: int, session: Watched) -> float:
        """The same with a watch of `session`, opened and closed outside of the time."""
        core = self.executor.core
        _, shown = sized_graph(core, next(self.feeds))
        watch = session.watch(core.engine, name="bench")
        watch.graph(shown, from_step=core.last_step + 1)
        begin = time.perf_counter()
        for _ in range(count):
            start_ns = time.time_ns()
            self.executor.run(fetch_list=[], feed=next(self.feeds))
            watch.step(
                step=core.last_step, start_ns=start_ns, end_ns=time.time_ns(), samples=self.batch_size, loss=None
            )
        seconds = time.perf_counter() - begin
        watch.close()
        return seconds


class EagerCtr:
    """The same model in PyTorch eager: two intra-op threads, a sparse table, SGD."""

    def __init__(self, workload: Workload) -> None:
        self.model = modules.network(workload)
        self.optimizers = modules.optimizers(workload, self.model)
        self.batches = itertools.cycle(modules.tensors(workload))

    def steps(self, count: int) -> float:
        """Train `count` steps and return their seconds."""
        torch.set_num_threads(NUM_REPLICAS)
        begin = time.perf_counter()
        for _ in range(count):
            batch = next(self.batches)
            loss = modules.loss_of(self.model(batch["ids"], batch["dense"]), batch["label"])
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
            for optimizer in self.optimizers:
                optimizer.step()
        return time.perf_counter() - begin

    def profiled(self, count: int) -> float:
        """The same inside a profile of CPU activity."""
        with profile(activities=[ProfilerActivity.CPU]):
            return self.steps(count)


def measure_step(training: Training, report: Report) -> None:
    """Add the events of a step, and what they cost of it."""
    engine, count = training.executor.core.engine, 10
    training.steps(count)
    engine.drain()
    seconds = [training.steps(1) for _ in range(count)]
    events = len(engine.drain()["op"]) / count
    step_ms = report.add("ctr_step_ms", [1e3 * s for s in seconds])
    report.figures["ctr_events_per_step"] = round(events, 1)
    cost_us = events * float(report.figures["trace_event_ns"]) / 1e3
    report.figures["ctr_events_us_per_step"] = round(cost_us, 3)
    report.figures["ctr_events_share_of_step"] = round(cost_us / 1e3 / step_ms, 6)


def measure_chain_pairs(num_rounds: int, report: Report) -> None:
    """Add the ratio for a chain of the smallest operators on one thread, where the trace weighs most."""
    engine = Engine(1, max_running=1, intra_op_threads=1)
    plan = chain_plan(CHAIN, alternate=False)
    one = torch.ones(1)

    def run() -> None:
        for _ in range(STEPS_OF_A_BLOCK["chain"]):
            plan.set(0, one)
            engine.run(plan, 1)

    def block(*, on: bool) -> float:
        engine.set_tracing(on=on)
        return timed(run)

    pairs = num_rounds * PAIRS_PER_ROUND["chain"]
    add_pairs(
        report, "chain_traced_over_untraced", paired_ratios(lambda: block(on=True), lambda: block(on=False), pairs)
    )
    engine.close()


def measure_watched(training: Training, num_rounds: int, report: Report) -> None:
    """Add the ratio of steps that a session watches over steps without one."""
    count = STEPS_OF_A_BLOCK["watched"]
    with SocketSink() as sink:
        contract = Managed("bench", "bench", "bench", "trainer", 0, 1, 1, sink.path)
        session = Watched(contract)
        pairs = num_rounds * PAIRS_PER_ROUND["watched"]
        ratios = paired_ratios(lambda: training.watched(count, session), lambda: training.steps(count), pairs)
        session.close()
    watched = add_pairs(report, "ctr_watched_over_unwatched", ratios)
    report.figures["watched_drain_cpu_s"] = round(session.drain_cpu_s, 4)
    report.ratios["unwatched"] = round(1 / watched, 4)


def measure_fed(num_rounds: int, report: Report) -> None:
    """Add the ratio of passes that record the work of the data feed over passes that do not."""
    with SocketSink() as sink, tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        session = Watched(Managed("bench", "bench", "bench", "trainer", 0, 1, 1, sink.path))
        for name, run in passes(Path(folder), session).items():
            run(True)
            pairs = num_rounds * PAIRS_PER_ROUND["fed"]
            ratios = paired_ratios(partial(run, True), partial(run, False), pairs)
            add_pairs(report, f"{name}_feed_recorded_over_unrecorded", ratios)
        session.close()


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure the event, the pairs, the watched pairs and the profiler."""
    report = Report("tracing", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    measure_trace(max(MIN_BLOCKS, rounds * 10), report)
    workload = criteo(num_batches=20)
    training = Training(workload)
    measure_step(training, report)
    count = STEPS_OF_A_BLOCK["ctr"]
    pairs = rounds * PAIRS_PER_ROUND["ctr"]
    ratios = paired_ratios(lambda: training.traced(count, on=True), lambda: training.traced(count, on=False), pairs)
    traced = add_pairs(report, "ctr_traced_over_untraced", ratios)
    measure_chain_pairs(rounds, report)
    measure_watched(training, rounds, report)
    measure_fed(rounds, report)
    eager = EagerCtr(workload)
    count = STEPS_OF_A_BLOCK["profiled"]
    ratios = paired_ratios(
        lambda: eager.profiled(count), lambda: eager.steps(count), rounds * PAIRS_PER_ROUND["profiled"]
    )
    profiled = add_pairs(report, "eager_profiled_over_unprofiled", ratios)
    report.ratios["untraced"] = round(1 / traced, 4)
    report.ratios["torch_profiler"] = round(profiled / traced, 4)
    training.executor.close()
    return report
