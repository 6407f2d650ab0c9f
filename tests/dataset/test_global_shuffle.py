"""Rows exchanged between trainers, here the threads of one process: every one once, or an error of all."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataset.oracle import Row, batches, dataset_of, rows

from penstock.dataset import global_shuffle, memory
from penstock.dataset.global_shuffle import _dealt
from penstock.errors import SpecError, Unavailable

ANNOUNCEMENT, PORT = 8, 5  # numbers that a worker announces; the place of its port
HELLO = struct.Struct("<qQ")  # the receiver's number, the sender's rank
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
        self.hall, self._rank = hall, rank

    def worker_num(self) -> int:
        return self.hall.num

    def worker_index(self) -> int:
        return self._rank

    def server_endpoints(self) -> list[str]:
        return ["127.0.0.1:1"]

    def all_reduce_worker(self, given: Any, output: Any) -> None:
        output[...] = self.hall.summed(np.array(given))


class Rerouted(Fleet):
    """One whose worker announces, for the port at which it listens, the one that `announced(port)` gives."""

    def __init__(self, hall: Hall, rank: int, announced: Callable[[int], int]) -> None:
        super().__init__(hall, rank)
        self._announced = announced

    def all_reduce_worker(self, given: Any, output: Any) -> None:
        if given.shape[1] == ANNOUNCEMENT:
            given[self._rank, PORT] = self._announced(int(given[self._rank, PORT]))
        super().all_reduce_worker(given, output)


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


def shuffled(
    datasets: list[Any], *seeds: int | None, announced: dict[int, Callable[[int], int]] | None = None
) -> list[Any]:
    """Shuffle as each trainer; `announced`: see `Rerouted`, by rank."""

    def shuffle(rank: int, fleet: Fleet) -> list[Row]:
        if announced and rank in announced:
            fleet = Rerouted(fleet.hall, rank, announced[rank])
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


def cut_off(lost: int) -> Callable[[int], int]:
    """Return what puts a relay before a worker's port: it loses the connection of rank `lost` after the greeting."""

    def relayed(port: int) -> int:
        relay = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=pass_on, args=(relay, port), daemon=True).start()
        return int(relay.getsockname()[1])

    def pass_on(relay: socket.socket, port: int) -> None:
        with relay:
            for _ in range(2):
                sender, _ = relay.accept()
                threading.Thread(target=carry, args=(sender, port), daemon=True).start()

    def carry(sender: socket.socket, port: int) -> None:
        with suppress(OSError), sender, socket.create_connection(("127.0.0.1", port)) as worker:
            hello = sender.recv(HELLO.size, socket.MSG_WAITALL)
            worker.sendall(hello)
            if HELLO.unpack(hello)[1] != lost:
                threading.Thread(target=acknowledge, args=(sender, worker), daemon=True).start()
                while part := sender.recv(1 << 16):
                    worker.sendall(part)

    def acknowledge(sender: socket.socket, worker: socket.socket) -> None:
        with suppress(OSError):
            sender.sendall(worker.recv(1))
        with suppress(OSError):  # nothing more comes: a worker that left without an answer has left for both
            sender.shutdown(socket.SHUT_RDWR)

    return relayed


def test_rows_that_cannot_be_sent_fail_all_and_stay_in_place(tmp_path: Path) -> None:
    datasets = loaded(tmp_path, [9, 9, 9])
    found = shuffled(datasets, 5, announced={2: cut_off(1)})
    assert all(isinstance(error, Unavailable) for error in found)
    assert "worker 2" in str(found[1])
    assert "worker 1" in str(found[0])
    # Worker 1 gives up as soon as it fails, which worker 2 meets where it happens to be: sending or receiving.
    either = ("rows of worker 1 did not arrive", "rows could not be given to worker 1")
    assert any(text in str(found[2]) for text in either)
    for rank, dataset in enumerate(datasets):
        assert sorted(rows(dataset)) == [row(100 * rank + n) for n in range(9)]
        position = dataset.position()
        dataset.set_position({**position, "samples": 0})
        assert len(rows(dataset)) == 9  # what was done to the order is known to positions


def test_strangers_at_the_door_are_sent_away(tmp_path: Path) -> None:
    def visited(*greetings: bytes) -> Callable[[int], int]:
        def visit(port: int) -> int:
            for greeting in greetings:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(greeting)
            return port

        return visit

    announced = {0: visited(b"GET / HTTP/1.0\r\n\r\n", b""), 1: visited(HELLO.pack(12345, 0), HELLO.pack(0, 0)[:8])}
    found = shuffled(loaded(tmp_path, [9, 9]), 5, announced=announced)
    assert sorted(r for part in found for r in part) == [row(n) for n in (*range(9), *range(100, 109))]


def test_who_does_not_come_is_named_after_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_shuffle, "SILENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        found = shuffled(loaded(tmp_path, [9, 9]), 5, announced={0: lambda port: elsewhere.getsockname()[1]})
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
