"""`bench grid`: num_threads x CPU_NUM x mode on CTR-DNN, to see whether the recommended setting is a good one.

The best practice that Fluid's documents give (num_threads = cores, CPU_NUM = num_threads, Reduce mode on CPU) against
every other cell: threads and replicas from 1 to twice the cores, both modes. Every cell trains the same batches, whole
batches of the same size split over its replicas, in an executor of its own; all cells run interleaved in one process,
the order turned round after each round, and the result of a cell is its median.

`best_practice_of_best`: samples per second of that setting over those of the best cell, by medians. So that luck among
many cells is not taken for a better setting, the interval of the pair's ratio by rounds is beside it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import penstock as fluid
from bench._environment import variable_set
from bench.engine import alternating_blocks
from bench.models import programs
from bench.report import Report, quartiles
from bench.workloads import NAMES, Workload, build
from penstock.exec.places import num_cores

ROUNDS = 7
STEPS_OF_A_BLOCK = 20
NUM_BATCHES = 20
MODES = ("reduce", "all_reduce")


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. `num_threads` and `cpu_num` as Fluid names them."""

    num_threads: int
    cpu_num: int
    mode: str

    @property
    def name(self) -> str:
        """How figures call it."""
        return f"threads_{self.num_threads}_cpu_num_{self.cpu_num}_{self.mode}"


def cells(cores: int) -> list[Cell]:
    """List the grid for a machine: 1, half, all and twice the cores, for both numbers; one replica has one mode."""
    counts = sorted({1, max(1, cores // 2), cores, 2 * cores})
    grid = [Cell(*chosen) for chosen in itertools.product(counts, counts, MODES)]
    return [cell for cell in grid if cell.cpu_num > 1 or cell.mode == MODES[0]]


def best_practice(cores: int) -> Cell:
    """Return what the documents recommend for CPU."""
    return Cell(cores, cores, "reduce")


class Running:
    """A cell's executor and its place in the batches."""

    def __init__(self, cell: Cell, workload: Workload) -> None:
        execution = fluid.ExecutionStrategy()
        execution.num_threads = cell.num_threads
        with variable_set("CPU_NUM", str(cell.cpu_num)):  # read when the executor is made
            made = programs.trainer(workload, build=programs.strategy(cell.mode), execution=execution)
        self.executor: fluid.ParallelExecutor = made[0]
        self._feeds: Iterator[Mapping[str, Any]] = itertools.cycle(made[2])

    def block(self, num_steps: int) -> float:
        """Train and return the seconds."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.executor.run(fetch_list=[], feed=next(self._feeds))
        return time.perf_counter() - begin

    def busy_share(self, num_steps: int) -> tuple[float, float]:
        """Return how much of the workers' time operators took, and the operators' seconds a step, from the trace."""
        engine = self.executor.core.engine
        engine.drain()
        seconds = self.block(num_steps)
        in_operators = float(engine.drain()["duration_ns"].sum()) / 1e9
        return in_operators / (seconds * engine.num_workers), in_operators / num_steps


def table(grid: Sequence[Cell], rates: Mapping[str, float], best: Cell) -> str:
    """Lay samples per second out: a row for each number of threads and mode, a column for each CPU_NUM."""
    columns = sorted({cell.cpu_num for cell in grid})
    lines = ["num_threads  mode        " + "".join(f"{f'CPU_NUM={n}':>12}" for n in columns)]
    for threads, mode in itertools.product(sorted({cell.num_threads for cell in grid}), MODES):
        shown = []
        for cpu_num in columns:
            cell = Cell(threads, cpu_num, mode)
            rate = f"{rates[cell.name]:.0f}" if cell.name in rates else "-"
            shown.append(f"{rate + ('*' if cell == best else ''):>12}")
        lines.append(f"{threads:<13}{mode:<12}" + "".join(shown))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--workload", choices=NAMES, default="criteo", help="what is trained (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS_OF_A_BLOCK, help="steps of a block (%(default)s)")
    parser.add_argument("--cores", type=int, default=num_cores(), help="as which machine (%(default)s)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Run the grid; without --json its table is printed first."""
    report = Report("grid", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)
    grid, recommended = cells(extra.cores), best_practice(extra.cores)
    workload = build(extra.workload, **({"num_batches": NUM_BATCHES} if extra.workload != "lenet" else {}))
    running = {cell.name: Running(cell, workload) for cell in grid}
    contenders: dict[str, Callable[[], float]] = {
        name: lambda cell=cell: cell.block(extra.steps)  # type: ignore[misc]  # bound by default
        for name, cell in running.items()
    }
    seconds = alternating_blocks(contenders, rounds)
    samples = extra.steps * workload.batch_size
    rates = {
        name: report.add(f"{name}_samples_per_s", [samples / s for s in times], digits=0)
        for name, times in seconds.items()
    }
    for name, cell in running.items():
        busy, operators_s = cell.busy_share(extra.steps)
        report.figures[f"{name}_busy_share"] = round(busy, 3)
        report.figures[f"{name}_operators_ms_per_step"] = round(1e3 * operators_s, 3)
        cell.executor.close()
    best = max(grid, key=lambda cell: rates[cell.name])
    ours, theirs = seconds[recommended.name], seconds[best.name]
    low, _, high = quartiles([b / a for a, b in zip(ours, theirs, strict=True)])
    report.figures["best_num_threads"], report.figures["best_cpu_num"] = best.num_threads, best.cpu_num
    report.figures["best_is_reduce"] = int(best.mode == "reduce")
    share = round(rates[recommended.name] / rates[best.name], 4)
    report.figures |= {"best_practice_of_best": share}
    report.figures |= {"best_practice_of_best_q1": round(low, 4), "best_practice_of_best_q3": round(high, 4)}
    report.ratios["best_cell"] = share
    if not json:
        print(table(grid, rates, best))
    return report
