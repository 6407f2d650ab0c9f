"""What readers and loaders note of their work, for the dashboard's lanes: real times, in their order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock import telemetry
from penstock.protocol.frames import FIRST_READER, Work
from penstock.telemetry.input import InputTrace
from penstock.telemetry.process import decide

ROWS = 64


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> InputTrace:
    """What a watched process has."""
    made = InputTrace()
    monkeypatch.setattr(telemetry, "input_trace", lambda: made)
    return made


def _program() -> tuple[Any, Any, Any]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[2], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.fc(x, 1))
        fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    return main, startup, x


def _file(folder: Path) -> str:
    path = folder / "rows"
    path.write_text("".join(f"2 {i} {i + 1}\n" for i in range(ROWS)))
    return str(path)


def _noted(trace: InputTrace) -> list[tuple[str, int, int, int]]:
    """(work, thread, begin, end), by their begin."""
    found = sorted(trace.drain().tolist())
    return [(Work(work).name, thread, begin, end) for begin, end, work, thread in found]


def test_a_pass_notes_reads_waits_and_batches(trace: InputTrace, tmp_path: Path) -> None:
    main, startup, x = _program()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup)
    dataset = fluid.DatasetFactory().create_dataset("QueueDataset")
    dataset.set_use_var([x])
    dataset.set_batch_size(16)
    dataset.set_filelist([_file(tmp_path)])
    began = time.time_ns()
    exe.train_from_dataset(main, dataset)
    ended = time.time_ns()
    noted = _noted(trace)
    by_work = {work: [one for one in noted if one[0] == work] for work in ("READ", "WAIT", "BATCH")}
    assert [one[1] for one in by_work["READ"]] == [FIRST_READER] * 4
    assert [one[1] for one in by_work["BATCH"]] == [0] * 4
    assert len(by_work["WAIT"]) == 4
    assert all(began <= begin <= end <= ended for _, _, begin, end in noted)
    reads = [(begin, end) for _, _, begin, end in by_work["READ"]]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(reads))
    # A batch is made of what was read before, as soon as its wait is over.
    for (_, _, _, read), (_, _, _, waited), (_, _, made, _) in zip(*by_work.values(), strict=True):
        assert read <= waited <= made


def test_passes_that_are_open_at_once_share_no_lane(trace: InputTrace, tmp_path: Path) -> None:
    _, _, x = _program()
    runs = []
    for _ in range(2):
        dataset = fluid.DatasetFactory().create_dataset("QueueDataset")
        dataset.set_use_var([x])
        dataset.set_batch_size(ROWS)
        dataset.set_filelist([_file(tmp_path)])
        runs.append(dataset.open())
    for run in runs:
        assert run.take() is not None
    for run in runs:
        run.close()
    threads = [thread for work, thread, *_ in _noted(trace) if work == "READ"]
    assert sorted(set(threads)) == [FIRST_READER, FIRST_READER + 1]
    assert trace.claim(1) == [FIRST_READER]  # given back


def test_samples_in_memory_are_gathered_not_waited_for(trace: InputTrace, tmp_path: Path) -> None:
    main, startup, x = _program()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup)
    dataset = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var([x])
    dataset.set_batch_size(16)
    dataset.set_filelist([_file(tmp_path)])
    dataset.load_into_memory()
    exe.train_from_dataset(main, dataset)
    assert {work for work, *_ in _noted(trace)} == {"BATCH"}


def test_a_generator_is_a_reader_and_its_run_waits(trace: InputTrace) -> None:
    main, startup, x = _program()
    with fluid.program_guard(main, startup):
        loader = fluid.io.DataLoader.from_generator(feed_list=[x], capacity=2, iterable=True)

    def batches() -> Iterator[list[Any]]:
        for _ in range(3):
            time.sleep(0.02)  # what a script's own parsing would take
            yield [np.ones((4, 2), "float32")]

    loader.set_batch_generator(batches)
    assert sum(1 for _ in loader()) == 3
    noted = _noted(trace)
    reads = [one for one in noted if one[0] == "READ"]
    assert len(reads) == 3
    assert all(thread >= FIRST_READER and end - begin > 15_000_000 for _, thread, begin, end in reads)
    assert [thread for work, thread, *_ in noted if work == "WAIT"][:3] == [0, 0, 0]


def test_an_unwatched_process_records_nothing() -> None:
    assert decide({}).input() is None
