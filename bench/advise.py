"""`bench advise`: whether `penstock advise` predicts what its settings then take, and whether it names a good one.

CTR-DNN and LeNet train under every setting that differs on this machine: threads at once and replicas from 1 to twice
the cores, AllReduce in buckets and in one bucket, Reduce. All cells of a workload run interleaved in one process, each
in an executor of its own; the order turns round after each round. Before that the script's default setting runs alone
and is recorded: its graph document, the engine's trace, its step times. From that recording alone
`penstock.advice.ranked.advise` predicts every cell.

A cell's time is the lower quartile of its steps, as interference on a shared machine only adds; the recording is read
at the same quantile. `error`: |predicted / measured - 1|. `advised_of_best`: the measured time of the best cell over
that of the advised one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import penstock as fluid
from bench import advise_servers
from bench._environment import variable_set
from bench.models import programs
from bench.report import Report, quartiles
from bench.workloads import Workload, build
from penstock.advice.ranked import Option, advise
from penstock.advice.recorded import Event, Recorded, recorded
from penstock.advice.setting import Setting, candidates
from penstock.exec.places import num_cores
from penstock.graph.document import document
from penstock.protocol.graphdoc import GraphDocument

ROUNDS = 10
STEPS_OF_A_BLOCK = 10
RECORDED_STEPS = 200
WARM_UP_STEPS = 10
QUANTILE = 0.25
WORKLOADS = {"ctr": "criteo", "lenet": "lenet"}
OTHERS = {"transformer": "transformer", "slots": "slots", "flights": "flights"}
"""On request: workloads from whose operators no constant of the model was taken."""
SERVERS = "servers"
"""On request: parameter servers (`bench/advise_servers.py`)."""


class Cell:
    """An executor under one setting, and its place in the batches. `setting`: None for the script's defaults."""

    def __init__(self, workload: Workload, setting: Setting | None) -> None:
        execution, strategy = fluid.ExecutionStrategy(), fluid.BuildStrategy()
        with ExitStack() as stack:
            for name, value in {} if setting is None else setting.environment().items():
                stack.enter_context(variable_set(name, value))  # read when the executor is made, as in a job
            made = programs.trainer(workload, build=strategy, execution=execution)
        self.executor: fluid.ParallelExecutor = made[0]
        self._feeds: Iterator[Mapping[str, Any]] = itertools.cycle(made[2])
        self.rows = workload.batch_size

    def steps(self, count: int) -> list[int]:
        """Train and return the nanoseconds of each step."""
        found = []
        for _ in range(count):
            feed = next(self._feeds)
            begin = time.perf_counter_ns()
            self.executor.run(fetch_list=[], feed=feed)
            found.append(time.perf_counter_ns() - begin)
        return found

    def graph(self) -> GraphDocument:
        """Return the graph document as telemetry sends it."""
        core = self.executor.core
        lowered = next(reversed(core._plans.values()))
        share, extra = divmod(self.rows, core.num_replicas)
        rows = [share + (replica >= core.num_replicas - extra) for replica in range(core.num_replicas)]
        return document(
            lowered.graph, core.program, lowered.shares, name="train", num_threads=core.num_threads, rows=rows
        )

    def recording(self, count: int, quantile: float) -> Recorded:
        """Record `count` steps. The setting is read from the recording, not from this cell."""
        self.steps(WARM_UP_STEPS)
        engine = self.executor.core.engine
        engine.drain()
        times = self.steps(count)
        made = recorded(
            self.graph(), events_of(engine.drain()), step_ns=at(times, quantile), cores=num_cores(), quantile=quantile
        )
        assert made is not None  # steps were run
        return made


def events_of(trace: Mapping[str, Any]) -> list[list[Event]]:
    """Return the events of each step of an engine's trace."""
    columns = [trace[name].tolist() for name in ("step", "op", "thread", "start_ns", "duration_ns")]
    by_step: dict[int, list[Event]] = {}
    for step, op, thread, start, duration in zip(*columns, strict=True):
        by_step.setdefault(step, []).append((op, thread, start, duration))
    return list(by_step.values())


def at(values: Sequence[int], quantile: float) -> float:
    """Return a quantile as one of the values."""
    return float(sorted(values)[int(quantile * len(values))])


def measured(cells: Mapping[Setting, Cell], rounds: int, steps: int) -> dict[Setting, list[int]]:
    """Return the nanoseconds of each cell's steps, interleaved by blocks."""
    times: dict[Setting, list[int]] = {setting: [] for setting in cells}
    for cell in cells.values():
        cell.steps(WARM_UP_STEPS)
    for index in range(rounds):
        order = list(cells)[:: -1 if index % 2 else 1]
        for setting in order:
            cells[setting].steps(1)  # the caches are another cell's
            times[setting] += cells[setting].steps(steps)
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=STEPS_OF_A_BLOCK, help="steps of a block (%(default)s)")
    parser.add_argument(
        "--workload", choices=(*WORKLOADS, *OTHERS, SERVERS), action="append", help=f"default: {', '.join(WORKLOADS)}"
    )
    parser.add_argument(
        "--places", default=",".join(advise_servers.PLACES), help=f"of the workload {SERVERS} (%(default)s)"
    )


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure and predict; without --json a table of each workload is printed."""
    report = Report("advise", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)
    for name in extra.workload or WORKLOADS:
        if name == SERVERS:
            places = advise_servers.places_of(extra.places)
            advise_servers.measure(rounds, extra.steps, report, json=json, places=places)
        else:
            _one(name, rounds, extra.steps, report, json=json)
    return report


def _one(name: str, rounds: int, steps: int, report: Report, *, json: bool) -> None:
    kind = {**WORKLOADS, **OTHERS}[name]
    workload = build(kind, **({"num_batches": 20} if kind != "lenet" else {}))
    alone = Cell(workload, None)
    run = alone.recording(RECORDED_STEPS, QUANTILE)
    alone.executor.close()
    grid = candidates(run.setting, cores=run.cores, rows=run.rows)
    options = {option.setting: option for option in advise(run, grid)}
    times = measured({setting: Cell(workload, setting) for setting in grid}, rounds, steps)
    taken = {setting: at(found, QUANTILE) for setting, found in times.items()}
    errors = {setting: options[setting].step_ns / taken[setting] - 1 for setting in grid}
    best = min(grid, key=lambda setting: taken[setting])
    advised = next(iter(options))
    low, middle, high = quartiles([abs(error) for error in errors.values()])
    report.figures |= {
        f"{name}_settings": len(grid), f"{name}_error": round(middle, 4), f"{name}_error_q1": round(low, 4),
        f"{name}_error_q3": round(high, 4), f"{name}_error_most": round(max(map(abs, errors.values())), 4),
        f"{name}_best_ms": round(taken[best] / 1e6, 3), f"{name}_advised_ms": round(taken[advised] / 1e6, 3),
        f"{name}_recorded_ms": round(run.step_ns / 1e6, 3),
        f"{name}_worst_of_best": round(max(taken.values()) / taken[best], 3),
    }  # fmt: skip
    report.ratios[f"{name}_advised_of_best"] = round(taken[best] / taken[advised], 4)
    if not json:
        print(_table(name, grid, options, taken, errors))


def _table(
    name: str, grid: Sequence[Setting], options: Mapping[Setting, Option], taken: Mapping[Setting, float],
    errors: Mapping[Setting, float],
) -> str:  # fmt: skip
    width = max(len(setting.name) for setting in grid)
    lines = [f"{name:<{width}}  predicted  measured  error"]
    for setting in options:
        mark = " (recorded)" if options[setting].is_current else ""
        lines.append(
            f"{setting.name:<{width}}  {options[setting].step_ns / 1e6:9.2f}  {taken[setting] / 1e6:8.2f}"
            f"  {errors[setting]:+5.1%}{mark}"
        )
    spread = statistics.median(abs(error) for error in errors.values())
    return "\n".join([*lines, f"median error {spread:.1%}"])
