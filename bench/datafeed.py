"""`bench datafeed`: from text to the batches that a program is fed, against what a user would read the same rows with.

The rows are click data: 13 decimal numbers, 26 ids, a label, in batches of 1000. All read the same rows from a
file in the page cache and end with a tensor for each input of each batch: ours MultiSlot text through a QueueDataset
(`penstock_queue`), or through an InMemoryDataset that is loaded, shuffled and gone through once (`penstock_memory`);
`torch_dataloader` the same text, split in Python in an IterableDataset with the default collate function; `pandas` and
`pyarrow` CSV of the same rows, `penstock_parquet` our reading of a Parquet file. Times are the processor's, of all
threads of the process, so that a rate is one of a core; rates are given in MB of the MultiSlot text a second, whatever
one reads. `read` is the ceiling of the same run: the text read into a buffer, block by block.

`paddle_memory` is paddlepaddle 2.6.2's InMemoryDataset, loaded, shuffled and gone through like ours.

`train_N_threads_k_samples_per_s` is `train_from_dataset` of CTR-DNN (the workload `criteo` of `bench ctr`) on N
threads over a QueueDataset, by the wall's clock; `paddle_train_…` is that of paddlepaddle 2.6.2 on the same files, in
turn with ours. Where its environment is not there (`make peers ARGS=paddle`), that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

import penstock as fluid
from bench import workloads
from bench.engine import alternating_blocks
from bench.models.programs import record_ctr
from bench.peers import PeerMissing, environment
from bench.peers.timed import TimedPeer
from bench.report import Report, quartiles
from penstock.dataset import Dataset
from penstock.dataset.slots import feed_of

ROUNDS = 7
BATCH = 1000
NUM_DENSE, NUM_IDS = 13, 26
COLUMNS = [*(f"d{i}" for i in range(NUM_DENSE)), *(f"C{i + 1}" for i in range(NUM_IDS)), "label"]
SLOW_SHARE = 20
"""A reader in Python is given one row in so many."""


class Rows:
    """The files of one run: the same rows as MultiSlot text, CSV and Parquet."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        random = np.random.default_rng(0)
        self.num_rows, self.text, self.csv = num_rows, folder / "rows.txt", folder / "rows.csv"
        self.short, self.parquet = folder / "short.txt", folder / "rows.parquet"
        dense = random.random((num_rows, NUM_DENSE)).round(6) * random.choice([0.1, 1.0, 10.0], NUM_DENSE)
        ids = (1_000_001 * random.random((num_rows, NUM_IDS)) ** 3).astype(np.int64)  # few are most of them
        labels = random.integers(0, 2, num_rows)
        with self.text.open("w") as text, self.csv.open("w") as csv:
            csv.write(",".join(COLUMNS) + "\n")
            for row in range(num_rows):
                numbers = [f"{x:.6g}" for x in dense[row]]
                text.write(f"{NUM_DENSE} {' '.join(numbers)} 1 {' 1 '.join(map(str, ids[row]))} 1 {labels[row]}\n")
                csv.write(f"{','.join(numbers)},{','.join(map(str, ids[row]))},{labels[row]}\n")
        with self.text.open() as text:
            self.short.write_text("".join(line for _, line in zip(range(num_rows // SLOW_SHARE), text, strict=False)))
        self.text_bytes = self.text.stat().st_size
        self._write_parquet(dense.astype(np.float32), ids, labels)

    def _write_parquet(self, dense: Any, ids: Any, labels: Any) -> None:
        import pyarrow  # an extra, which this benchmark needs
        from pyarrow import parquet

        columns = {f"C{i + 1}": ids[:, i] for i in range(NUM_IDS)}
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(dense.reshape(-1)), NUM_DENSE)
        parquet.write_table(pyarrow.table({"dense": lists, **columns, "label": labels}), self.parquet)


def inputs() -> list[Any]:
    """Declare the inputs in a program of their own."""
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        dense = fluid.layers.data("dense", [NUM_DENSE])
        ids = [fluid.layers.data(f"C{i + 1}", [1], dtype="int64") for i in range(NUM_IDS)]
        return [dense, *ids, fluid.layers.data("label", [1], dtype="int64")]


def dataset_over(path: Path, variables: list[Any], kind: str = "QueueDataset") -> Any:
    """Return a data set of one reader."""
    dataset = fluid.DatasetFactory().create_dataset(kind)
    dataset.set_use_var(variables)
    dataset.set_batch_size(BATCH)
    dataset.set_filelist([str(path)])
    return dataset


def go_through(dataset: Dataset) -> int:
    """Make every batch's tensors; return how many rows there were."""
    run, count = dataset.open(), 0
    wanted = {slot.name for slot in run.slots}
    while (batch := run.take()) is not None:
        count += len(feed_of(batch, run.slots, wanted)["label"])
        run.used(batch)
    run.close()
    return count


class _Lines(IterableDataset[dict[str, Any]]):
    """What a user writes for DataLoader."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open() as text:
            for line in text:
                parts = line.split()
                dense = np.array(parts[1 : 1 + NUM_DENSE], np.float32)
                rest = parts[1 + NUM_DENSE :]
                yield {"dense": dense, "ids": np.array(rest[1:-2:2], np.int64), "label": int(rest[-1])}


def through_dataloader(path: Path) -> int:
    """Go through the text with torch's DataLoader."""
    return sum(len(batch["label"]) for batch in DataLoader(_Lines(path), batch_size=BATCH))


def _tensors(columns: Callable[[str], Any], num_rows: int) -> int:
    dense = torch.from_numpy(np.stack([np.asarray(columns(n), np.float32) for n in COLUMNS[:NUM_DENSE]], 1))
    others = {n: torch.from_numpy(np.array(columns(n), np.int64)).view(-1, 1) for n in COLUMNS[NUM_DENSE:]}
    count = 0
    for first in range(0, num_rows, BATCH):
        feed = {"dense": dense[first : first + BATCH], **{n: t[first : first + BATCH] for n, t in others.items()}}
        count += len(feed["label"])
    return count


def through_pandas(path: Path) -> int:
    """Read CSV with pandas, cut it into batches."""
    import pandas  # an extra, which this benchmark needs

    frame = pandas.read_csv(path)
    return _tensors(lambda name: frame[name].to_numpy(), len(frame))


def through_pyarrow(path: Path) -> int:
    """Read CSV with pyarrow on one thread, cut it into batches."""
    from pyarrow import csv  # an extra, which this benchmark needs

    table = csv.read_csv(path, read_options=csv.ReadOptions(use_threads=False))
    return _tensors(lambda name: table.column(name).to_numpy(), table.num_rows)


def through_memory(path: Path, variables: list[Any]) -> int:
    """Load, shuffle, and go through once."""
    dataset = dataset_over(path, variables, "InMemoryDataset")
    dataset.load_into_memory()
    dataset.local_shuffle(seed=1)
    return go_through(dataset)


def read_only(path: Path) -> int:
    """Read a file and do nothing with it."""
    buffer = bytearray(256 << 10)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return 0


def core_seconds(action: Callable[[], int], rows: Rows, expected: int) -> float:
    """Return the processor's seconds for all rows, of an action on `expected` of them. SystemExit if it lost any."""
    begin = time.process_time()
    count = action()
    seconds = time.process_time() - begin
    if expected and count != expected:
        raise SystemExit(f"bench datafeed: {count} rows came of {expected}")
    return seconds * rows.num_rows / (expected or rows.num_rows)


class PaddleDatasets(TimedPeer):
    """The original's data sets, in a process. Raises PeerMissing at once if its environment is not there."""

    def __init__(self, what: str, threads: int, files: list[Path]) -> None:
        given = [what, str(threads), str(files[0].parent), *map(str, files)]
        command = [str(environment("paddle")), "-m", "bench.peers.paddle_dataset", *given]
        super().__init__(command, threads=1)  # each of its trainers computes on one


def measure_reading(rows: Rows, num_rounds: int, report: Report) -> None:
    """Add the rate of each, and the ratios."""
    variables, whole, short = inputs(), rows.num_rows, rows.num_rows // SLOW_SHARE
    actions: dict[str, tuple[Callable[[], int], int]] = {
        "penstock_queue": (lambda: go_through(dataset_over(rows.text, variables)), whole),
        "penstock_memory": (lambda: through_memory(rows.text, variables), whole),
        "penstock_parquet": (lambda: go_through(dataset_over(rows.parquet, variables)), whole),
        "torch_dataloader": (lambda: through_dataloader(rows.short), short),
        "pandas": (lambda: through_pandas(rows.csv), whole),
        "pyarrow": (lambda: through_pyarrow(rows.csv), whole),
        "read": (lambda: read_only(rows.text), 0),
    }

    def timed(action: Callable[[], int], expected: int) -> Callable[[], float]:
        return lambda: core_seconds(action, rows, expected)

    contenders = {name: timed(*action) for name, action in actions.items()}
    with contextlib.ExitStack() as stack:
        paddle = _peer(stack, report, "paddle_memory", lambda: PaddleDatasets("memory", 1, [rows.text]))
        if paddle is not None:
            contenders["paddle_memory"] = lambda: paddle.ask("cpu")
        samples = alternating_blocks(contenders, num_rounds)
    for name, seconds in samples.items():
        report.add(f"{name}_mb_per_s_core", [1e-6 * rows.text_bytes / s for s in seconds], digits=1)
    for peer in ("torch_dataloader", "pandas", "pyarrow"):
        _add_ratio(report, peer, samples["penstock_queue"], samples[peer])
    if paddle is not None:
        _add_ratio(report, "paddle_memory", samples["penstock_memory"], samples["paddle_memory"])


def _peer(stack: contextlib.ExitStack, report: Report, name: str, make: Callable[[], TimedPeer]) -> TimedPeer | None:
    try:
        return stack.enter_context(make())
    except PeerMissing as error:
        report.missing[name] = str(error)
        return None


def _add_ratio(report: Report, name: str, ours: list[float], theirs: list[float]) -> None:
    report.ratios[name] = round(quartiles([t / o for t, o in zip(theirs, ours, strict=True)])[1], 3)


def measure_training(rows: Rows, threads: list[int], num_rounds: int, report: Report) -> None:
    """Add how fast CTR-DNN trains from the text, and the original's share of that."""
    workload = workloads.build("criteo")
    recorded = record_ctr(workload)
    variables = [recorded.main.handle(slot.name) for slot in sorted(recorded.main.feeds(), key=column_of)]
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(recorded.startup, scope=scope)
    parts = _halves(rows)

    def one_pass(num: int) -> float:
        dataset = dataset_over(parts[0], variables)
        dataset.set_filelist([str(part) for part in parts])
        dataset.set_thread(num)
        begin = time.perf_counter()
        exe.train_from_dataset(recorded.main, dataset, scope=scope)
        return time.perf_counter() - begin

    for num in threads:
        name = f"train_{num}_threads"
        contenders: dict[str, Callable[[], float]] = {name: partial(one_pass, num)}
        with contextlib.ExitStack() as stack:
            paddle = _peer(stack, report, f"paddle_{name}", partial(PaddleDatasets, "train", num, parts))
            if paddle is not None:
                contenders[f"paddle_{name}"] = partial(paddle.ask, "wall")
            samples = alternating_blocks(contenders, num_rounds)
        for key, seconds in samples.items():
            report.add(f"{key}_k_samples_per_s", [1e-3 * rows.num_rows / s for s in seconds], digits=2)
        if paddle is not None:
            _add_ratio(report, f"paddle_{name}", samples[name], samples[f"paddle_{name}"])


def column_of(desc: Any) -> int:
    """Return the place of an input in a line."""
    return 0 if desc.name == "dense" else 99 if desc.name == "label" else int(desc.name[1:])


def _halves(rows: Rows) -> list[Path]:
    lines = rows.text.read_text().splitlines(keepends=True)
    parts = [rows.text.with_name(f"half{i}.txt") for i in range(2)]
    for i, part in enumerate(parts):
        part.write_text("".join(lines[i::2]))
    return parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rows", type=float, default=1e5, help="rows that are read, as 1e5 (%(default)s)")
    parser.add_argument(
        "--threads", nargs="*", type=int, default=[1, 2], help="threads that train (1 2); none: skip it"
    )


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure reading, then training."""
    report = Report("datafeed", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        rows = Rows(Path(folder), int(extra.rows))
        report.figures["rows"], report.figures["bytes_a_row"] = rows.num_rows, round(rows.text_bytes / rows.num_rows, 1)
        measure_reading(rows, rounds, report)
        if extra.threads:
            measure_training(rows, extra.threads, rounds, report)
    return report
