"""QueueDataset: every sample once for all readers and takers; settings; positions."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset.oracle import Row, batches, dataset_of, drained, inputs, rows

import penstock as fluid
from penstock.dataset import DataError, QueueDataset, dataset_base
from penstock.dataset.position import FilePlaces
from penstock.dataset.slots import padded_length
from penstock.dataset.streaming import StreamingRun
from penstock.errors import SpecError

SLOTS = [(False, 1), (True, 2), (False, 0)]


def files_of(folder: Path, num_files: int, num_lines: int) -> list[Path]:
    files = []
    for f in range(num_files):
        files.append(folder / f"part-{f}")
        first = f * num_lines
        text = "".join(f"1 {n} 2 {n}.5 -{n} {n % 3 + 1}{' 7' * (n % 3 + 1)}\n" for n in range(first, first + num_lines))
        files[-1].write_text(text)
    return files


def expected(first: int, last: int) -> list[Row]:
    return [((n,), (n + 0.5, -float(n)), (7,) * (n % 3 + 1)) for n in range(first, last)]


def test_row_85_the_factory_makes_a_queue_dataset_by_default() -> None:
    assert type(fluid.DatasetFactory().create_dataset()) is QueueDataset
    assert type(fluid.DatasetFactory().create_dataset("InMemoryDataset")) is fluid.InMemoryDataset
    with pytest.raises(ValueError, match="datafeed class BoxPSDataset does not exist"):
        fluid.DatasetFactory().create_dataset("BoxPSDataset")


def test_one_reader_keeps_file_order_and_batches_span_files(tmp_path: Path) -> None:
    dataset = dataset_of(files_of(tmp_path, 3, 5), SLOTS, batch_size=4)
    found = list(batches(dataset))
    assert [len(batch) for batch in found] == [4, 4, 4, 3]
    assert [row for batch in found for row in batch] == expected(0, 15)


@pytest.mark.parametrize("num_takers", [1, 3])
def test_row_86_many_readers_and_takers_lose_and_double_no_line(tmp_path: Path, num_takers: int) -> None:
    dataset = dataset_of(files_of(tmp_path, 7, 2000), SLOTS, batch_size=16)
    dataset.set_thread(3)
    run = dataset.open()
    seen: list[list[int]] = [[] for _ in range(num_takers)]

    def take(number: int) -> None:
        while (batch := run.take()) is not None:
            seen[number] += batch.values(0, 1, False)[:, 0].tolist()
            run.used(batch)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(num_takers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.close()
    assert sorted(n for part in seen for n in part) == list(range(14_000))
    assert run.num_readers == 3
    assert all(ended for _, _, _, ended in run.position()["files"])


def test_row_86_there_are_no_more_readers_than_files(tmp_path: Path) -> None:
    dataset = dataset_of(files_of(tmp_path, 2, 3), SLOTS)
    dataset.set_thread(8)
    run = dataset.open()
    run.close()
    assert run.num_readers == 2


def test_row_87_settings_are_used_and_their_defaults_are_fluids(tmp_path: Path) -> None:
    dataset = fluid.DatasetFactory().create_dataset()
    dataset.set_use_var(inputs(SLOTS))
    dataset.set_filelist([str(file) for file in files_of(tmp_path, 1, 40)])
    assert dataset.thread_num == 1
    assert [len(batch) for batch in batches(dataset)] == [32, 8]
    dataset.set_batch_size(40)
    dataset.set_pipe_command("head -n 2")
    assert rows(dataset) == expected(0, 2)
    assert 'pipe_command: "head -n 2"' in dataset.desc()
    assert 'name: "slot1"\n        type: "float"\n        is_dense: true' in dataset.desc()
    for setter, value in (("set_batch_size", 0), ("set_thread", -1), ("set_pipe_command", " ")):
        with pytest.raises(SpecError, match=setter):
            getattr(dataset, setter)(value)
    with pytest.raises(NotImplementedError, match="use an InMemoryDataset"):
        dataset.local_shuffle()
    with pytest.raises(AttributeError):
        dataset.set_nonsense()


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_hints_that_have_no_effect_say_so_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = fluid.DatasetFactory().create_dataset(kind)
    dataset.set_fleet_send_sleep_seconds(0)
    assert caplog.messages == []
    for _ in range(2):
        dataset.set_queue_num(12)
        dataset.set_fleet_send_sleep_seconds(2)
    assert [re.match(r"(\w+) has no effect: ", line)[1] for line in caplog.messages] == [  # type: ignore[index]
        "set_queue_num", "set_fleet_send_sleep_seconds"
    ]  # fmt: skip
    with pytest.raises(SpecError, match="set_queue_num is given 0"):
        dataset.set_queue_num(0)


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_a_pass_over_an_empty_list_of_files_has_no_batches(kind: str) -> None:
    dataset = fluid.DatasetFactory().create_dataset(kind)
    dataset.set_use_var(inputs(SLOTS))
    begin = dataset.open if kind == "QueueDataset" else dataset.load_into_memory
    with pytest.raises(SpecError, match=r"has no files; call dataset\.set_filelist"):
        begin()
    dataset.set_filelist([])  # of a trainer for which there is none
    begin()
    assert list(batches(dataset)) == []


def test_calls_without_a_meaning_here_are_refused_by_name() -> None:
    dataset = fluid.DatasetFactory().create_dataset()
    for name in dataset_base._REFUSED:
        with pytest.raises(SpecError, match=f"{name} is not supported: "):
            getattr(dataset, name)(1)


def test_what_cannot_be_a_slot_is_refused_by_name() -> None:
    dataset = fluid.DatasetFactory().create_dataset()
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        wrong_type = fluid.layers.data("x", [1], dtype="int32")
        free = fluid.layers.data("y", [-1, -1], dtype="int64")
        made = fluid.layers.fc(fluid.layers.data("z", [4]), 2)
    with pytest.raises(ValueError, match="'x' has dtype 'int32'"):
        dataset.set_use_var([wrong_type])
    with pytest.raises(SpecError, match=r"'y' has shape .*lod_level=1"):
        dataset.set_use_var([free])
    with pytest.raises(SpecError, match="expected inputs of the program"):
        dataset.set_use_var([made])
    with pytest.raises(SpecError, match=r"call dataset\.set_use_var"):
        dataset.open()


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_row_87_an_error_shows_how_a_sequence_is_declared(tmp_path: Path, kind: str) -> None:
    """Of one with a lod_level that the program uses as if it had one row a sample, as Fluid's scripts may."""
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        one = fluid.layers.data("one", [1], dtype="int64", lod_level=1)
        plain = fluid.layers.data("plain", [1], dtype="int64")
        fluid.layers.concat([one, plain], axis=1)
    (tmp_path / "good").write_text("1 7 1 8\n")
    (tmp_path / "bad").write_text("2 7 9 1 8\n")
    (tmp_path / "other").write_text("1 7 2 8 9\n")
    hint = "'one' has lod_level=1, but the program uses it together .* pool them first"
    for name, message in (("bad", hint), ("other", "slot 'plain' announces 2 values, but its variable has 1 a row. ")):
        dataset = fluid.DatasetFactory().create_dataset(kind)
        dataset.set_use_var([one, plain])
        dataset.set_filelist([str(tmp_path / "good"), str(tmp_path / name)])
        begin = dataset.load_into_memory if kind == "InMemoryDataset" else lambda d=dataset: drained(d.open())
        with pytest.raises(DataError, match=message):
            begin()


@given(st.integers(1, 10_000))
def test_few_padded_lengths_are_near_every_length(longest: int) -> None:
    padded = padded_length(longest)
    assert longest <= padded <= max(2, 1.5 * longest)
    assert bin(padded).count("1") <= 2


@pytest.mark.parametrize("at_most", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("piped", [False, True])
def test_a_resumed_pass_gives_the_rest_of_the_interrupted_one(tmp_path: Path, at_most: int, piped: bool) -> None:
    files = files_of(tmp_path, 3, 5)

    def made() -> Any:
        dataset = dataset_of(files, SLOTS, batch_size=4)
        if piped:
            dataset.set_pipe_command("tail -n +1")
        return dataset

    first = made()
    before = [row for batch in batches(first, at_most) for row in batch]
    position = json.loads(json.dumps(first.position()))
    second = made()
    second.set_position(position)
    assert second.position() == position
    assert before + rows(second) == expected(0, 15)
    assert rows(second) == expected(0, 15)  # the next pass is a whole one


def test_a_resumed_pass_of_many_readers_gives_each_sample_once(tmp_path: Path) -> None:
    files = files_of(tmp_path, 5, 100)
    first = dataset_of(files, SLOTS, batch_size=7)
    first.set_thread(3)
    before = [row for batch in batches(first, 20) for row in batch]
    second = dataset_of(files, SLOTS, batch_size=7)
    second.set_thread(2)
    second.set_position(first.position())
    assert sorted(before + rows(second)) == expected(0, 500)


def test_a_batch_that_was_taken_and_not_used_is_read_again(tmp_path: Path) -> None:
    dataset = dataset_of(files_of(tmp_path, 1, 9), SLOTS, batch_size=4)
    run = dataset.open()
    assert run.take() is not None
    run.close()
    dataset.set_position(dataset.position())
    assert rows(dataset) == expected(0, 9)


def test_bad_lines_that_are_left_out_do_not_shift_the_position(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("1 0\nbad\n1 1\n1 2\nbad\n1 3\n1 4")
    dataset = dataset_of([tmp_path / "part"], [(False, 1)], batch_size=2)
    dataset.set_bad_line_policy("skip")
    before = [row for batch in batches(dataset, 1) for row in batch]
    dataset.set_position(dataset.position())
    assert before + rows(dataset) == [((n,),) for n in range(5)]


def test_a_position_of_other_files_is_refused(tmp_path: Path) -> None:
    files = files_of(tmp_path, 2, 3)
    position = dataset_of(files, SLOTS).position()
    with pytest.raises(SpecError, match="not one of this file list"):
        dataset_of(files[:1], SLOTS).set_position(position)
    with pytest.raises(SpecError, match="not one of this file list"):
        dataset_of(files, SLOTS).set_position({"kind": "memory", "seeds": [], "samples": 3})


@given(st.permutations(range(6)), st.integers(0, 6))
def test_a_files_position_is_its_used_batches_without_a_gap(order: list[int], count: int) -> None:
    places = FilePlaces(["a"])
    for number in order[:count]:
        places.used(0, number, [(0, 10 * (number + 1), number + 1, number == 5)])
    without_gap = next(n for n in range(7) if n not in order[:count])
    assert places.as_position()["files"] == [["a", 10 * without_gap, without_gap, without_gap == 6]]


def test_the_first_error_of_a_reader_is_everybodys(tmp_path: Path) -> None:
    files = files_of(tmp_path, 2, 50_000)
    files[1].write_text("bad\n")
    dataset = dataset_of(files, SLOTS)
    dataset.set_thread(2)
    run: StreamingRun = dataset.open()
    with pytest.raises(fluid.dataset.DataError, match=r"part-1:1:1: "):
        drained(run)
    with pytest.raises(fluid.dataset.DataError):
        run.take()
    run.close()
