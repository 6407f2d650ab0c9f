"""`bench table`: the sparse table's pulls and pushes, and what a row costs beyond its own bytes, against peers.

Ids are drawn from the whole int64 range: an odd factor times a row's number, modulo 2^64. Batches are uniform over the
rows, the worst case: no row is in a cache. A *training step* is a pull, then a push of the same ids. Rates are rows per
second; all contenders of one configuration take one batch each, interleaved, in one run, into memory that exists.
With one thread, seconds are the processor's, with one for each core those on the wall.

`array` is the ceiling of the run: the same number of rows gathered from a plain array by their number, on huge pages,
each asked for in time. It reads one line of memory for a row of 16 floats where a table of any ids reads two.
`lines_1` and `lines_2` are the ceiling of memory alone: one and two random cache lines for each id, nothing copied.
`map` is a loop over a std::unordered_map with rows on the heap (same compiler and flags); it does not sum equal ids.
`fbgemm` is FBGEMM's CPU table of the same rows, by number, in a process of its own (`make peers`).

Overhead is what the table holds from the system beyond values and states, in bytes a row: at the end, and at the worst
moment since it was a quarter full. `rss` is the same by the process's resident memory.

`--rows 1e8 --width 4` is the demonstration of a large table on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from bench._fbgemm_table import FbgemmTable
from bench.engine import alternating_blocks, timed
from bench.peers import PeerMissing
from bench.peers.hash_map import ArrayRows, MapTable
from bench.report import Report, quartiles
from penstock.ps.table import SparseTable, TableSettings

ROUNDS = 15
BATCH = 131_072
NUM_BATCHES = 8
LARGEST_MAP = 20_000_000  # rows; it takes some 150 bytes for one of 16 floats
LR = 0.01
RULES = ("sgd", "adagrad")

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Contenders = dict[str, Callable[[], float]]


def ids_of(numbers: Ids) -> Ids:
    """Spread row numbers over int64, one to one."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def resident_bytes() -> int:
    """Return the memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Batches:
    """The same batches for all: row numbers, their ids, one array of gradients and one of results."""

    def __init__(self, rows: int, width: int, batch: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.numbers = [random.integers(0, rows, batch) for _ in range(NUM_BATCHES)]
        self.ids = [ids_of(numbers) for numbers in self.numbers]
        self.gradients = random.normal(size=(batch, width)).astype(np.float32)
        self.out = np.zeros((batch, width), np.float32)
        self._turn = 0

    def next(self) -> int:
        """Return the number of the next batch."""
        self._turn += 1
        return self._turn % NUM_BATCHES


def filled(rows: int, width: int, rule: str, report: Report, name: str) -> SparseTable:
    """Make a table with all its rows; add how fast they were made, and what they cost, to the report."""
    states = {"moment": 0.0} if rule == "adagrad" else {}
    row_bytes = 4 * width * (1 + len(states))
    before, worst = resident_bytes(), 0.0
    table = SparseTable(TableSettings(name="bench", width=width, capacity=rows, states=states))
    out = np.zeros((BATCH, width), np.float32)

    def fill() -> None:
        nonlocal worst
        for first in range(0, rows, BATCH):
            ids = ids_of(np.arange(first, min(first + BATCH, rows)))
            table.pull(ids, out=out[: len(ids)])
            if len(table) >= rows / 4:
                worst = max(worst, table.held_bytes / len(table) - row_bytes)

    report.figures[f"{name}_made_m_rows_per_s"] = round(1e-6 * rows / timed(fill), 2)
    report.figures[f"{name}_overhead_bytes"] = round(table.overhead_bytes / rows, 2)
    report.figures[f"{name}_overhead_bytes_worst"] = round(worst, 2)
    report.figures[f"{name}_overhead_bytes_rss"] = round((resident_bytes() - before) / rows - row_bytes, 2)
    return table


def push(table: SparseTable, rule: str, ids: Ids, gradients: Floats, threads: int = 1) -> None:
    """Push by SGD or Adagrad."""
    (table.push_sgd if rule == "sgd" else table.push_adagrad)(ids, gradients, lr=LR, threads=threads)


def core_seconds(action: Callable[[], object]) -> float:
    """Return the seconds that this thread ran."""
    begin = time.thread_time()
    action()
    return time.thread_time() - begin


def pull_of(table: SparseTable, batches: Batches) -> Callable[[], float]:
    """Return the contender that pulls one batch."""
    return lambda: core_seconds(lambda: table.pull(batches.ids[batches.next()], out=batches.out))


def lines_of(array: ArrayRows, lines_a_row: int) -> Callable[[], float]:
    """Return the contender that reads so many random cache lines for each row of a batch."""
    random = np.random.default_rng(lines_a_row)
    lines = [random.integers(0, array.num_lines, BATCH * lines_a_row) for _ in range(NUM_BATCHES)]
    turns = itertools.cycle(lines)
    return lambda: core_seconds(lambda: array.read_lines(next(turns)))


def train_of(table: SparseTable, rule: str, batches: Batches) -> Callable[[], float]:
    """Return the contender that pulls one batch and pushes its gradients."""

    def step() -> None:
        ids = batches.ids[batches.next()]
        table.pull(ids, out=batches.out)
        push(table, rule, ids, batches.gradients)

    return lambda: core_seconds(step)


class Threads:
    """Threads that wait for work, as FBGEMM's do: to begin one for each batch is no part of a rate."""

    def __init__(self, num: int) -> None:
        self._work: list[SimpleQueue[Callable[[], object] | None]] = [SimpleQueue() for _ in range(num)]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in self._work]
        for thread in self._threads:
            thread.start()

    def _run(self, work: SimpleQueue[Callable[[], object] | None]) -> None:
        while (action := work.get()) is not None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001  # raised by `seconds`
                self._done.put(error)
            else:
                self._done.put(None)

    def seconds(self, actions: Sequence[Callable[[], object]]) -> float:
        """Run all at once, each on a thread of its own; return the seconds until the last has ended. Raises theirs."""

        def together() -> None:
            for work, action in zip(self._work, actions, strict=True):
                work.put(action)
            for error in [self._done.get() for _ in actions]:
                if error is not None:
                    raise error

        return timed(together)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def map_contenders(rows: int, width: int, rule: str, batches: Batches, report: Report) -> Iterator[Contenders]:
    """Give the contenders of a map with the same rows; none, with a word in the report, if there are too many rows."""
    if rows > LARGEST_MAP:
        report.missing["map"] = f"{rows} rows on the heap, at most {LARGEST_MAP} are tried"
        yield {}
        return
    before = resident_bytes()
    with MapTable(width) as table:
        for first in range(0, rows, BATCH):
            ids = ids_of(np.arange(first, min(first + BATCH, rows)))
            table.pull(ids, np.empty((len(ids), width), np.float32))
        used = (resident_bytes() - before) / rows - 8 * width  # it has room for Adagrad's sums in any case
        report.figures.setdefault("map_overhead_bytes_rss", round(used, 2))  # later ones find memory that was freed

        def step() -> None:
            ids = batches.ids[batches.next()]
            table.pull(ids, batches.out)
            table.push(rule, ids, batches.gradients, LR)

        yield {
            "map_pull": lambda: core_seconds(lambda: table.pull(batches.ids[batches.next()], batches.out)),
            "map_train": lambda: core_seconds(step),
        }


@contextlib.contextmanager
def fbgemm_contenders(
    rows: int, width: int, rule: str, batch: int, threads: int, report: Report
) -> Iterator[Contenders]:
    """Give the contenders of FBGEMM's process; none, with a word in the report, if its environment is missing."""
    try:
        process = FbgemmTable(rows=rows, width=width, rule=rule, batch=batch, threads=threads)
    except PeerMissing as error:
        report.missing["fbgemm"] = str(error)
        yield {}
        return
    with process:
        yield {"fbgemm_pull": process.pull, "fbgemm_train": process.train}


def add_rates(samples: dict[str, list[float]], rows: int, prefix: str, report: Report) -> None:
    """Add rates in millions of rows per second, and the ratios of ours to each peer's of the same turn."""
    for name, seconds in samples.items():
        report.add(f"{prefix}_{name}_m_rows_per_s", [1e-6 * rows / s for s in seconds], digits=2)
    for what in ("pull", "train"):
        for peer in ("map", "fbgemm", "array", "lines_1", "lines_2"):
            theirs = samples.get(f"{peer}_{what}")
            if theirs is not None:
                ratios = [t / s for t, s in zip(theirs, samples[f"penstock_{what}"], strict=True)]
                report.ratios[f"{prefix}_{peer}_{what}"] = round(quartiles(ratios)[1], 3)


def measure_one_core(table: SparseTable, rows: int, rule: str, num_rounds: int, report: Report) -> None:
    """Add the rates of one thread of each."""
    width = table.settings.width
    batches = Batches(rows, width, BATCH)
    ours: Contenders = {"penstock_pull": pull_of(table, batches), "penstock_train": train_of(table, rule, batches)}
    with (
        ArrayRows(rows, width) as array,
        map_contenders(rows, width, rule, batches, report) as theirs,
        fbgemm_contenders(rows, width, rule, BATCH, 1, report) as fbgemm,
    ):
        ceiling = {
            "array_pull": lambda: core_seconds(lambda: array.gather(batches.numbers[batches.next()], batches.out)),
            "lines_1_pull": lines_of(array, 1),
            "lines_2_pull": lines_of(array, 2),
        }
        samples = alternating_blocks({**ours, **ceiling, **theirs, **fbgemm}, num_rounds)
    add_rates(samples, BATCH, f"{rule}_1", report)


def measure_all_cores(table: SparseTable, rows: int, rule: str, num_rounds: int, report: Report) -> None:
    """Add the rates of as many threads as there are cores: ours a batch each, FBGEMM's all on one larger batch."""
    num_threads = len(os.sched_getaffinity(0))
    width = table.settings.width
    each = [Batches(rows, width, BATCH, seed) for seed in range(num_threads)]
    with (
        Threads(num_threads) as threads,
        fbgemm_contenders(rows, width, rule, BATCH * num_threads, num_threads, report) as fbgemm,
    ):
        ours: Contenders = {
            "penstock_pull": lambda: threads.seconds([pull_of(table, batches) for batches in each]),
            "penstock_train": lambda: threads.seconds([train_of(table, rule, batches) for batches in each]),
        }
        samples = alternating_blocks({**ours, **fbgemm}, num_rounds)
    add_rates(samples, BATCH * num_threads, f"{rule}_{num_threads}", report)
    measure_one_push(table, rule, each[0], num_rounds, report)


def measure_one_push(table: SparseTable, rule: str, batches: Batches, num_rounds: int, report: Report) -> None:
    """Add the rates of one push by one thread and by one for each core, on the wall: what an update of a server has."""
    num_threads = len(os.sched_getaffinity(0))

    def by(threads: int) -> Callable[[], float]:
        return lambda: timed(lambda: push(table, rule, batches.ids[batches.next()], batches.gradients, threads))

    samples = alternating_blocks({"by_1": by(1), f"by_{num_threads}": by(num_threads)}, num_rounds)
    for name, seconds in samples.items():
        report.add(f"{rule}_push_{name}_m_rows_per_s", [1e-6 * BATCH / s for s in seconds], digits=2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rows", type=float, default=1e7, help="rows of the table, as 1e7 (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="floats of a row (%(default)s)")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES, help="optimizers (all)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure one size of table with each optimizer."""
    report = Report("table", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    rows, width = int(extra.rows), extra.width
    report.figures["rows"], report.figures["width"] = rows, width
    for rule in extra.rules:
        table = filled(rows, width, rule, report, rule)
        measure_one_core(table, rows, rule, rounds, report)
        measure_all_cores(table, rows, rule, rounds, report)
        del table
    return report
