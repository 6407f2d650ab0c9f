"""Rows exchanged between trainers, here the threads of one process: every one once, or an error of all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataset.oracle import Row, batches, dataset_of, rows

from penstock.dataset import exchange, memory
from penstock.dataset.exchange import _dealt
from penstock.errors import SpecError, Unavailable

SLOTS = [(False, 1), (True, 2), (False, 0)]


class Hall:
    """Where the trainers of a job of threads meet, as at parameter servers."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._barrier = threading.Barrier(num, timeout=60)
        self._lock = threading.Lock()
        self._sum: Any = 0

    def summed(self, given: Any) -> Any:
        with self._lock:
            self._sum = self._sum + given
        self._barrier.wait()
        total = self._sum
        if self._barrier.wait() == 0:
            self._sum = 0
        self._barrier.wait()
        return total


class Fleet:
    """A worker's fleet, as far as data sets use it."""

    def __init__(self, hall: Hall, rank: int) -> None:
        self._hall, self._rank = hall, rank

    def worker_num(self) -> int:
        return self._hall.num

    def worker_index(self) -> int:
        return self._rank

    def server_endpoints(self) -> list[str]:
        return ["127.0.0.1:1"]

    def all_reduce_worker(self, given: Any, output: Any) -> None:
        output[...] = self._hall.summed(np.array(given))


def line(number: int) -> str:
    return f"1 {number} 2 {number}.5 -1 {number % 3 + 1}{' 7' * (number % 3 + 1)}\n"


def row(number: int) -> Row:
    return ((number,), (number + 0.5, -1.0), (7,) * (number % 3 + 1))


def loaded(folder: Path, sizes: Sequence[int]) -> list[Any]:
    """Return a data set in memory for each trainer."""
    datasets = []
    for rank, size in enumerate(sizes):
        (folder / f"part-{rank}").write_text("".join(line(100 * rank + n) for n in range(size)))
        datasets.append(dataset_of([folder / f"part-{rank}"], SLOTS, "InMemoryDataset"))
        datasets[-1].set_fleet_send_batch_size(4)
        datasets[-1].load_into_memory()
    return datasets


def together(count: int, do: Callable[[int, Fleet], Any]) -> list[Any]:
    """Do something as each trainer; return what each gives, or raises."""
    hall = Hall(count)
    found: list[Any] = [None] * count

    def guarded(rank: int) -> None:
        try:
            found[rank] = do(rank, Fleet(hall, rank))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def shuffled(datasets: list[Any], *seeds: int | None) -> list[Any]:
    def shuffle(rank: int, fleet: Fleet) -> list[Row]:
        datasets[rank].global_shuffle(fleet, seed=seeds[rank % len(seeds)])
        return rows(datasets[rank])

    return together(len(datasets), shuffle)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=4), st.integers(0, 1 << 70))
@settings(max_examples=20, deadline=None)
def test_every_row_is_at_one_trainer_and_all_have_equally_many(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    found = shuffled(loaded(folder, sizes), seed)
    expected = [row(100 * rank + n) for rank, size in enumerate(sizes) for n in range(size)]
    assert sorted(r for part in found for r in part) == expected
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert shuffled(loaded(folder, sizes), seed) == found


@given(st.lists(st.integers(0, 20), min_size=2, max_size=5))
def test_rows_are_dealt_out_in_turn_over_all_trainers(sizes: list[int]) -> None:
    num, begin = len(sizes), 0
    got = [0] * num
    for size in sizes:
        dealt = _dealt(begin, size, num)
        assert dealt == [sum((begin + i) % num == rank for i in range(size)) for rank in range(num)]
        got = [a + b for a, b in zip(got, dealt, strict=True)]
        begin += size
    assert max(got) - min(got) <= 1


def test_each_shuffle_moves_rows_between_trainers_differently(tmp_path: Path) -> None:
    datasets = loaded(tmp_path, [30, 30])
    once = shuffled(datasets, None)
    twice = shuffled(datasets, None)
    assert all({r[0][0] // 100 for r in part} == {0, 1} for part in (*once, *twice))
    assert [sorted(part) for part in once] != [sorted(part) for part in twice]


def test_other_seeds_or_inputs_of_a_trainer_are_an_error_of_all(tmp_path: Path) -> None:
    datasets = loaded(tmp_path, [5, 5])
    for seeds in ((1, 2), (1, None)):
        found = shuffled(datasets, *seeds)
        assert all(isinstance(error, SpecError) and "gives another seed" in str(error) for error in found)
    datasets[1] = dataset_of([tmp_path / "other"], [(False, 1)], "InMemoryDataset")
    (tmp_path / "other").write_text("1 5\n")
    datasets[1].load_into_memory()
    found = shuffled(datasets, 1)
    assert all(isinstance(error, SpecError) and "has set other inputs" in str(error) for error in found)


def test_rows_that_cannot_be_sent_fail_all_and_stay_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = loaded(tmp_path, [9, 9, 9])
    send = exchange._Exchange._send_to

    def fails(self: Any, rank: int) -> None:
        if self._peers.rank == 1 and rank == 2:
            with socket.create_connection(self._told.endpoints[rank]) as to:  # says who it is, and is lost
                to.sendall(exchange._HELLO.pack(self._told.numbers[rank], 1))
            raise OSError("the cable is out")
        send(self, rank)

    monkeypatch.setattr(exchange._Exchange, "_send_to", fails)
    found = shuffled(datasets, 5)
    assert all(isinstance(error, Unavailable) for error in found)
    assert "the cable is out" in str(found[1])
    assert all("worker 1" in str(found[rank]) for rank in (0, 2))
    monkeypatch.undo()
    for rank, dataset in enumerate(datasets):
        assert sorted(rows(dataset)) == [row(100 * rank + n) for n in range(9)]
        position = dataset.position()
        dataset.set_position({**position, "samples": 0})
        assert len(rows(dataset)) == 9  # what was done to the order is known to positions


def test_strangers_at_the_door_are_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = loaded(tmp_path, [9, 9])
    send = exchange._Exchange._send_to

    def with_company(self: Any, rank: int) -> None:
        for greeting in (b"GET / HTTP/1.0\r\n\r\n", b"", exchange._HELLO.pack(12345, 0)):
            with socket.create_connection(self._told.endpoints[rank]) as stranger:
                stranger.sendall(greeting)
        send(self, rank)

    monkeypatch.setattr(exchange._Exchange, "_send_to", with_company)
    found = shuffled(datasets, 5)
    assert sorted(r for part in found for r in part) == [row(n) for n in (*range(9), *range(100, 109))]


def test_who_does_not_come_is_named_after_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SILENCE_S", 1.0)
    monkeypatch.setattr(exchange, "_LOOK_S", 0.1)
    datasets = loaded(tmp_path, [9, 9])
    send = exchange._Exchange._send_to
    monkeypatch.setattr(
        exchange._Exchange, "_send_to", lambda self, rank: send(self, rank) if self._peers.rank == 0 else None
    )
    found = shuffled(datasets, 5)
    assert all(isinstance(error, Unavailable) for error in found)
    assert "worker 1 did not connect within 1 s" in str(found[0])


def test_resuming_after_a_global_shuffle_needs_the_same_call(tmp_path: Path) -> None:
    datasets = loaded(tmp_path, [10, 11])
    whole = shuffled(datasets, 5)
    before = [r for batch in batches(datasets[1], 2) for r in batch]
    position = json.loads(json.dumps(datasets[1].position()))
    again = loaded(tmp_path, [10, 11])
    again[1].set_position(position)
    with pytest.raises(SpecError, match="for which all trainers are needed"):
        rows(again[1])
    left = shuffled(again, 5)[1]  # the position that was set is that of the pass
    assert before + left == whole[1]


def test_sizes_are_those_of_all_workers(tmp_path: Path) -> None:
    datasets = loaded(tmp_path, [3, 4])
    assert together(2, lambda rank, fleet: datasets[rank].get_memory_data_size(fleet)) == [7, 7]
    assert together(2, lambda rank, fleet: datasets[rank].get_shuffle_data_size(fleet)) == [0, 0]
    assert datasets[1].get_memory_data_size() == 4


def test_row_81_complements_are_redrawn_in_each_order_and_resume(tmp_path: Path) -> None:
    datasets = loaded(tmp_path, [30, 10])

    def one_pass(rank: int, fleet: Fleet, at_most: int = 100) -> list[list[int]]:
        datasets[rank].set_complement(fleet=fleet, seed=4)
        found: list[list[int]] = []
        run = datasets[rank].open_for_training()
        while len(found) < at_most and (batch := run.take()) is not None:
            found.append(batch.values(0, 1, False)[:, 0].tolist())
            run.used(batch)
        run.close()
        return found

    first, second = together(2, one_pass)
    assert [len(b) for b in first] == [3] * 10
    assert [len(b) for b in second] == [3, 3, 3, 1, *[3] * 6]
    assert together(2, one_pass)[1] == second
    for at_most in range(11):
        began = together(2, partial(one_pass, at_most=at_most))
        datasets[1].set_position(json.loads(json.dumps(datasets[1].position())))
        went_on = together(2, one_pass)
        assert began[1] + went_on[1] == second
    datasets[1].local_shuffle(seed=1)
    assert together(2, one_pass)[1][4:] != second[4:]
    datasets[0].set_batches_per_pass(3)
    with pytest.raises(SpecError, match="set one"):
        datasets[0].open_for_training()
    empty = memory.InMemoryDataset()
    with pytest.raises(SpecError, match="set_complement is not supported: only what is in memory"):
        dataset_of([], SLOTS).set_complement()
    assert empty.get_memory_data_size() == 0
