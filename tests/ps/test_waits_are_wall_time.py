"""A trainer's waits are wall time: never more than passed, however many threads and servers took part in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ps.communicator_harness import SETTINGS
from tests.ps.small_server import SmallServer

from penstock.ps.at_once import at_once
from penstock.ps.client import TrainerClient
from penstock.ps.communicators.asynchronous import AsyncCommunicator
from penstock.ps.counters import Counters, count_no_waits_here
from penstock.ps.remote import Descriptor, PsMode
from penstock.ps.settings import TrainerSettings

PUSH_S = 0.05
NAMES = [f"w{i}" for i in range(8)]


class Clock:
    """Time that the test moves, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def waited(counters: Counters) -> int:
    """Return the waits of all rows, in nanoseconds."""
    return sum(row.wait_ns for row in counters.rows().values())


def test_calls_that_are_waited_for_at_once_share_the_time() -> None:
    clock = Clock()
    counters = Counters(clock)
    with counters.waiting("a", "w"):
        clock.now += 10
        with counters.waiting("b", "v"):
            clock.now += 6
        clock.now += 1
    assert {key: row.wait_ns for key, row in counters.rows().items()} == {("a", "w"): 14, ("b", "v"): 3}


def test_wait_that_is_under_way_is_told_up_to_now() -> None:
    clock = Clock()
    counters = Counters(clock)
    with counters.waiting("a"):
        clock.now += 5
        assert waited(counters) == 5
    clock.now += 7
    assert waited(counters) == 5


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "look"]), st.integers(0, 1000), st.integers(0, 3))))
def test_waits_sum_to_the_time_with_any_request_outstanding(steps: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    counters = Counters(clock)
    waits: list[ExitStack] = []
    covered = lost = 0
    for what, passes, peer in steps:
        clock.now += passes
        covered += passes if waits else 0
        lost += len(waits)  # at most that, to rounding
        if what == "begin":
            waits.append(ExitStack())
            waits[-1].enter_context(counters.waiting(f"peer {peer}"))
        elif what == "end" and waits:
            waits.pop(peer % len(waits)).close()
        assert covered - lost <= waited(counters) <= covered
    for wait in waits:
        wait.close()


def test_nobody_waits_for_what_a_background_thread_has_others_do() -> None:
    counters = Counters()
    pool = ThreadPoolExecutor(2)

    def call() -> None:
        with counters.waiting("a"):
            threading.Event().wait(0.01)

    def background() -> None:
        count_no_waits_here()
        at_once(pool, [call] * 3)

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert waited(counters) == 0
    at_once(pool, [call] * 3)  # the pool's threads are as they were
    assert waited(counters) >= 10_000_000
    pool.shutdown()


@pytest.fixture
def servers() -> Iterator[list[SmallServer]]:
    """Two asynchronous servers that take their time for every push and pull."""
    made = [SmallServer({name: torch.zeros(2) for name in NAMES}, sync=False) for _ in range(2)]

    def take_time(kind: str) -> None:
        if kind in ("push", "pull"):
            threading.Event().wait(PUSH_S)

    for server in made:
        server.delay = take_time
    yield made
    for server in made:
        server.close()


def connected(servers: list[SmallServer], mode: PsMode) -> TrainerClient:
    client = TrainerClient(
        Descriptor(mode, 0, 1, tuple(s.endpoint for s in servers)),
        TrainerSettings(epoch=1, lease_s=10, start_s=60, deadline_s=60),
    )
    client.connect()
    return client


def test_two_servers_that_are_waited_for_together_count_once(servers: list[SmallServer]) -> None:
    client = connected(servers, "async")
    began = time.perf_counter_ns()
    client.recv("w", ["w0", "w1"], [0, 1], [torch.empty(2), torch.empty(2)])
    client.send("w", ["w0", "w1"], [0, 1], [torch.ones(2), torch.ones(2)])
    wall = time.perf_counter_ns() - began
    rows = client.counters.rows()
    client.close()
    assert 2 * PUSH_S * 1e9 <= sum(row.wait_ns for row in rows.values()) <= wall
    for server, block in zip(servers, ("w0", "w1"), strict=True):
        assert rows[server.endpoint, block].wait_ns > 0


def test_threads_of_a_communicator_wait_on_nobody_s_time(servers: list[SmallServer]) -> None:
    """Eight pushes of 50 ms by four threads, for which the training thread did not wait."""
    client = connected(servers, "async")
    settings = replace(SETTINGS, thread_pool_size=4)
    trainer = AsyncCommunicator(client, client.descriptor, settings, counters=client.counters)
    began = time.perf_counter_ns()
    for at, name in enumerate(NAMES):
        trainer.send(f"{name}@GRAD", [name], [at % 2], [torch.ones(2)])
    wall = time.perf_counter_ns() - began
    trainer.close()
    assert [server.requests.count("push") for server in servers] == [4, 4]
    assert waited(client.counters) <= wall
    assert all(client.counters.rows()[servers[at % 2].endpoint, name].wait_ns == 0 for at, name in enumerate(NAMES))


def test_prefetched_rows_cost_only_the_remaining_wait(servers: list[SmallServer]) -> None:
    client = connected(servers, "async")
    ids = torch.tensor([0, 1])
    for server in servers:
        server.values["t"] = torch.zeros(4, 2)
        server.delay = lambda kind: None
    look = partial(client.prefetch, "t", ["t"], [0], [], ids, torch.empty(2, 2))
    look()
    begun, go_on = threading.Event(), threading.Event()

    def hold(kind: str) -> None:
        if kind == "lookup":
            begun.set()
            go_on.wait(60)

    servers[0].delay = hold
    before = waited(client.counters)
    assert client.rows.prefetch_ahead("t", ids)
    assert begun.wait(60)
    threading.Event().wait(0.1)  # the step before computes
    assert waited(client.counters) == before
    go_on.set()
    look()
    client.close()
