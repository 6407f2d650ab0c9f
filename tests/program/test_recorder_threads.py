"""Threads: each records its own Program whole, the default Programs are the process's, and eager calls go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import penstock as fluid
from penstock.program.program import Program


def recorded() -> list[str]:
    main = Program(seed=1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    with fluid.program_guard(main, Program(seed=1)):
        fluid.optimizer.SGD(0.1).minimize(module(fluid.layers.data("x", [4])).mean())
    return [op.type for op in main.operators]


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """Run tasks in threads that start at the same moment."""
    barrier = threading.Barrier(len(tasks))

    def start(task: Callable[[], Any]) -> Any:
        barrier.wait(30)
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(start, tasks))


def test_programs_that_threads_record_at_once_are_whole() -> None:
    alone = recorded()
    for found in together(*[lambda: [recorded() for _ in range(6)]] * 3):
        assert found == [alone] * 6


def test_threads_share_default_programs_but_not_guards() -> None:
    mine = Program(seed=1)
    with fluid.program_guard(mine, mine):
        (seen,) = together(lambda: (fluid.default_main_program(), fluid.default_startup_program()))
        assert fluid.default_main_program() is mine
    assert seen == (fluid.default_main_program(), fluid.default_startup_program())
    assert seen[0] is fluid.default_main_program()
    assert seen[1] is fluid.default_startup_program()


def test_modules_that_run_eagerly_beside_a_recording_give_values() -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.TransformerEncoderLayer(4, 1, 8))
    done = threading.Event()

    def run() -> set[type]:
        kinds: set[type] = set()
        while not done.is_set():
            kinds.add(type(eager(torch.ones(2, 4))))
        return kinds

    def record() -> list[list[str]]:
        try:
            return [recorded() for _ in range(6)]
        finally:
            done.set()

    kinds, programs = together(run, record)
    assert kinds <= {torch.Tensor}
    assert programs == [recorded()] * 6
