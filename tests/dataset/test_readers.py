"""Readers: batches, orders and combinations of samples; threads and processes that fail or are not run to their end."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import until

from penstock.dataset.readers import (
    ComposeNotAligned,
    Reader,
    batch,
    buffered,
    cache,
    chain,
    compose,
    distributed_batch_reader,
    firstn,
    map_readers,
    multiprocess_reader,
    shuffle,
    xmap_readers,
)
from penstock.errors import SpecError


def numbers(count: int, start: int = 0) -> Reader:
    return lambda: iter(range(start, start + count))


def failing_after(count: int) -> Reader:
    def reader() -> Iterator[int]:
        yield from range(count)
        raise RuntimeError("a broken file")

    return reader


@pytest.mark.parametrize(
    ("drop_last", "expected"), [(False, [[0, 1, 2], [3, 4, 5], [6]]), (True, [[0, 1, 2], [3, 4, 5]])]
)
def test_batches_are_lists_and_the_last_may_be_short(drop_last: bool, expected: list[list[int]]) -> None:
    reader = batch(numbers(7), 3, drop_last)
    assert list(reader()) == list(reader()) == expected


def test_a_batch_size_below_one_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match="batch_size is 0"):
        batch(numbers(7), 0)


def test_shuffle_permutes_each_buffer_by_the_random_module() -> None:
    random.seed(3)
    found = list(shuffle(numbers(10), 4)())
    assert [sorted(found[:4]), sorted(found[4:8]), sorted(found[8:])] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    random.seed(3)
    assert found == list(shuffle(numbers(10), 4)()) != list(range(10))
    assert list(shuffle(numbers(10), 0)()) == list(range(10))


def test_simple_readers_give_what_their_names_say() -> None:
    assert list(chain(numbers(2), numbers(2, 7))()) == [0, 1, 7, 8]
    assert list(firstn(numbers(9), 3)()) == [0, 1, 2]
    assert list(map_readers(lambda a, b: a * b, numbers(3), numbers(5, 1))()) == [0, 2, 6]
    once = iter([4, 5])
    cached = cache(lambda: once)
    assert list(cached()) + list(cached()) == [4, 5, 4, 5]


def test_compose_joins_the_fields_of_samples() -> None:
    pairs: Reader = lambda: iter([(1, 2), (3, 4)])  # noqa: E731
    assert list(compose(pairs, numbers(2))()) == [(1, 2, 0), (3, 4, 1)]
    assert list(compose(pairs, numbers(3), check_alignment=False)()) == [(1, 2, 0), (3, 4, 1)]
    with pytest.raises(ComposeNotAligned, match=r"readers \[0\] of 2"):
        list(compose(pairs, numbers(3))())


def test_compose_takes_readers_of_arrays() -> None:
    arrays: Reader = lambda: iter([np.arange(3), np.arange(3) + 1])  # noqa: E731
    found = list(compose(arrays, numbers(2))())
    assert [(first.tolist(), second) for first, second in found] == [([0, 1, 2], 0), ([1, 2, 3], 1)]


THREADED: dict[str, Callable[[Reader], Reader]] = {
    "buffered": lambda reader: buffered(reader, 2),
    "xmap": lambda reader: xmap_readers(lambda x: x, reader, 3, 2),
    "xmap in order": lambda reader: xmap_readers(lambda x: x, reader, 3, 2, order=True),
    "processes": lambda reader: multiprocess_reader([reader]),
}
in_the_background = pytest.mark.parametrize("made", THREADED.values(), ids=THREADED)


@in_the_background
def test_every_sample_of_a_background_reader_arrives(made: Callable[[Reader], Reader]) -> None:
    reader = made(numbers(50))
    assert sorted(reader()) == sorted(reader()) == list(range(50))


@in_the_background
def test_an_error_in_the_background_is_raised_to_the_taker(made: Callable[[Reader], Reader]) -> None:
    with pytest.raises(RuntimeError, match="a broken file"):
        list(made(failing_after(20))())


@in_the_background
def test_threads_of_an_abandoned_reader_end(made: Callable[[Reader], Reader]) -> None:
    others = set(threading.enumerate())
    running = iter(made(numbers(10**9))())
    next(running)
    del running
    until(lambda: not set(threading.enumerate()) - others, "the reader's threads end")


def test_mapped_samples_keep_their_order_when_asked() -> None:
    def slow_at_first(x: int) -> int:
        time.sleep(0.05 if x == 0 else 0)
        return x * x

    assert list(xmap_readers(slow_at_first, numbers(20), 4, 3, order=True)()) == [x * x for x in range(20)]


def test_an_error_of_a_mapper_is_raised_to_the_taker() -> None:
    with pytest.raises(ZeroDivisionError):
        list(xmap_readers(lambda x: 1 // (5 - x), numbers(20), 2, 3)())


def test_processes_merge_their_samples() -> None:
    found = list(multiprocess_reader([numbers(20), numbers(20, 100)])())
    assert sorted(found) == [*range(20), *range(100, 120)]


def test_a_process_that_is_killed_is_an_error() -> None:
    def killed() -> Iterator[int]:
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(SpecError, match="exit code -9"):
        list(multiprocess_reader([killed])())


def test_an_error_that_does_not_pickle_arrives_as_text() -> None:
    class Odd(Exception):
        """Of no module."""

    def odd() -> Iterator[Any]:
        yield 1
        raise Odd("local")

    with pytest.raises(SpecError, match="Odd"):
        list(multiprocess_reader([odd])())


def test_no_readers_for_processes_are_refused() -> None:
    with pytest.raises(SpecError, match="no readers"):
        multiprocess_reader([])


def test_a_signal_handler_of_the_script_does_not_hold_processes() -> None:
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:

        def ended() -> Iterator[int]:
            yield 1
            os.kill(os.getpid(), signal.SIGTERM)
            yield from numbers(10**9)()

        with pytest.raises(SpecError, match="exit code -15"):
            list(multiprocess_reader([ended])())
        running = iter(multiprocess_reader([numbers(10**9), numbers(10**9)])())
        next(running)
        running.close()  # type: ignore[attr-defined]  # a generator
        assert not multiprocessing.active_children()
    finally:
        signal.signal(signal.SIGTERM, former)


ABANDONED = """
import multiprocessing, os, signal
from penstock.dataset.readers import multiprocess_reader

def reader():
    while True:
        yield [0] * 10_000

next(iter_ := iter(multiprocess_reader([reader, reader, reader])()))
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_when_the_script_is_killed() -> None:
    """They hold the script's output, which is read to its end."""
    ran = subprocess.run(
        [sys.executable, "-c", ABANDONED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False
    )
    assert (ran.returncode, len(ran.stdout.split())) == (-signal.SIGKILL, 3)


def test_each_trainer_takes_the_batches_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch(lambda: range(14), 2)
    assert list(distributed_batch_reader(whole)()) == list(whole())
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "3")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    assert list(distributed_batch_reader(whole)()) == [[2, 3], [8, 9]]
