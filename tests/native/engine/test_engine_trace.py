"""The trace holds one event for each instruction that ran, with honest times, and counts what it lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.native.engine.engine_plans import lower, random_recipe

from penstock.native.engine import Engine, TorchPlan


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(2, max_running=2, intra_op_threads=1)
    yield made
    made.close()


def products(count: int, size: int = 4) -> TorchPlan:
    plan = TorchPlan(1)
    plan.keep(0)
    plan.set(0, torch.ones(size, size))
    for i in range(count):
        plan.add("aten::mm", "", [("slot", 0), ("slot", 0)], [None], 500 + i)
    plan.seal()
    return plan


def test_one_event_for_each_instruction_and_step(engine: Engine) -> None:
    plan = products(40)
    for step in (7, 2**40):
        engine.run(plan, step)
    events = engine.drain()
    assert sorted(zip(events["step"].tolist(), events["op"].tolist(), strict=True)) == [
        (step, 500 + i) for step in (7, 2**40) for i in range(40)
    ]
    assert events["lost"] == 0
    assert set(events["thread"].tolist()) <= {0, 1}
    assert len(engine.drain()["op"]) == 0


def test_columns_have_the_promised_types(engine: Engine) -> None:
    engine.run(products(3), 1)
    events = engine.drain()
    types = {name: column.dtype.name for name, column in events.items() if name != "lost"}
    assert types == {"start_ns": "int64", "duration_ns": "uint32", "op": "uint32", "step": "uint64", "thread": "uint16"}


def test_times_are_unix_times_and_a_thread_runs_one_op_at_once(engine: Engine) -> None:
    plan = products(60, size=128)
    engine.run(plan, 1)
    engine.drain()
    before = time.time_ns()
    engine.run(plan, 2)
    after = time.time_ns()
    events = engine.drain()
    tolerance_ns = 50_000  # of the two clocks' readings against each other, on a machine that may preempt either
    start, end = events["start_ns"], events["start_ns"] + events["duration_ns"].astype(np.int64)
    assert start.min() >= before - tolerance_ns
    assert end.max() <= after + tolerance_ns
    assert 0 < events["duration_ns"].astype(np.int64).sum() <= 2 * (after - before + tolerance_ns)
    for thread in (0, 1):
        mine = events["thread"] == thread
        assert np.all(start[mine][1:] >= end[mine][:-1])


def test_a_successor_starts_after_its_predecessor_ended(engine: Engine) -> None:
    recipe = random_recipe(5, size=60)
    plan = lower(recipe, kept=set())
    for slot in range(recipe.num_inputs):
        plan.set(slot, torch.ones(8, 8))
    engine.run(plan, 1)
    events = engine.drain()
    start = dict(zip(events["op"].tolist(), events["start_ns"].tolist(), strict=True))
    duration = dict(zip(events["op"].tolist(), events["duration_ns"].tolist(), strict=True))
    for i, call in enumerate(recipe.calls):
        for value in call.reads:
            if value >= recipe.num_inputs:
                before = 1000 + value - recipe.num_inputs
                assert start[1000 + i] >= start[before] + duration[before]


def test_rounding_never_overlaps_consecutive_operators(engine: Engine) -> None:
    plan = products(60)
    for step in range(2000):
        engine.run(plan, step)
        events = engine.drain()
        end = events["start_ns"] + events["duration_ns"].astype(np.int64)
        for thread in (0, 1):
            mine = events["thread"] == thread
            assert np.all(events["start_ns"][mine][1:] >= end[mine][:-1])


def test_host_instructions_are_traced_on_threads_of_their_own(engine: Engine) -> None:
    plan = TorchPlan(0)
    pause = threading.Event()

    def wait(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        pause.wait(0.01)
        return []

    plan.add_python(wait, [], [], 9)
    plan.seal()
    engine.run(plan, 1)
    events = engine.drain()
    assert events["op"].tolist() == [9]
    assert events["thread"].tolist() == [2]
    assert events["duration_ns"][0] >= 9_000_000


def test_an_overflowing_ring_keeps_the_newest_and_counts_losses() -> None:
    engine = Engine(1, max_running=1, intra_op_threads=1, ring_capacity=64)
    plan = products(100)
    engine.run(plan, 1)
    events = engine.drain()
    assert events["lost"] == 36
    assert events["op"].tolist() == [500 + i for i in range(36, 100)]
    engine.run(plan, 2)
    engine.run(plan, 3)
    events = engine.drain()
    engine.close()
    assert events["lost"] == 136
    assert set(events["step"].tolist()) == {3}


def test_draining_while_steps_run_neither_loses_nor_repeats(engine: Engine) -> None:
    plan = products(50)
    stop = threading.Event()
    seen: list[tuple[int, int]] = []
    lost = 0

    def collect() -> None:
        nonlocal lost
        events = engine.drain()
        lost += events["lost"]
        seen.extend(zip(events["step"].tolist(), events["op"].tolist(), strict=True))

    def drain() -> None:
        while not stop.is_set():
            collect()

    thread = threading.Thread(target=drain)
    thread.start()
    for step in range(200):
        engine.run(plan, step)
    stop.set()
    thread.join()
    collect()
    assert len(seen) + lost == 200 * 50
    assert len(set(seen)) == len(seen)
