"""Async: who trains waits only for room; what is merged, pulled, and left behind at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ps.communicator_harness import (
    SETTINGS,
    WAIT_S,
    Gate,
    Make,
    away,
    communicators,
    in_thread,
    joined,
    ones,
    zeros,
)
from tests.ps.fake_servers import FakeServers
from tests.support.waiting import until

from penstock.errors import Bug, Unavailable
from penstock.ps.communicators.asynchronous import AsyncCommunicator
from penstock.ps.communicators.half_async import HalfAsyncCommunicator


@pytest.fixture
def opened() -> Iterator[Make]:
    """Make communicators that are closed at the end."""
    with communicators() as make:
        yield make


def test_a_full_queue_makes_the_trainer_wait(opened: Make) -> None:
    servers = FakeServers(zeros())
    gate = servers.before_push = Gate()
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, send_queue_size=1))
    trainer.send("w@GRAD", ["w"], [0], ones())
    assert gate.arrived.acquire(timeout=WAIT_S)  # the first is being pushed
    trainer.send("w@GRAD", ["w"], [0], ones())  # the second fills the queue
    thread, errors = in_thread(lambda: trainer.send("w@GRAD", ["w"], [0], ones()))
    trainer.send("v@GRAD", ["v"], [0], ones())  # another variable has a queue of its own
    until(lambda: trainer.counters.rows()["", "w@GRAD"].wait_ns > 50_000_000)
    assert thread.is_alive()
    gate.opened.set()
    joined(thread)
    assert not errors


def test_gradients_that_wait_are_summed_into_one_push(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, max_merge_var_num=3, merge_wait_s=1e6))
    for value in (1.0, 2.0, 4.0):
        trainer.send("w@GRAD", ["w"], [0], ones(value))
    until(lambda: len(servers.pushes) == 1)
    assert servers.pushes[0][1].tolist() == [7, 7]
    until(lambda: trainer.counters.rows()["", "w@GRAD"].merges == 2)  # counted once the servers have it


def test_gradients_are_averaged_for_other_optimizers_than_sgd(opened: Make) -> None:
    servers = FakeServers(zeros())
    settings = replace(SETTINGS, max_merge_var_num=3, merge_wait_s=1e6, is_sgd_optimizer=False)
    trainer = opened(AsyncCommunicator, servers, settings)
    for value in (1.0, 2.0, 6.0):
        trainer.send("w@GRAD", ["w"], [0], ones(value))
    until(lambda: len(servers.pushes) == 1)
    assert servers.pushes[0][1].tolist() == [3, 3]


def test_a_short_merge_is_sent_when_nothing_comes_any_more(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, max_merge_var_num=3, merge_wait_s=0.03))
    trainer.send("w@GRAD", ["w"], [0], ones())
    until(lambda: len(servers.pushes) == 1)


def test_the_memory_of_a_gradient_is_the_programs_again_at_once(opened: Make) -> None:
    servers = FakeServers(zeros())
    gate = servers.before_push = Gate()
    trainer = opened(AsyncCommunicator, servers)
    gradient = ones(3.0)
    trainer.send("w@GRAD", ["w"], [0], gradient)
    gradient[0].fill_(99.0)
    gate.opened.set()
    trainer.close()
    assert servers.pushes[0][1].tolist() == [3, 3]


def test_rows_of_any_id_are_merged_and_pushed_once(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, max_merge_var_num=2, merge_wait_s=1e6))
    for ids in ([2**62, -5], [-5, -5]):
        trainer.send_rows("t@GRAD", ["t"], [0, 1], [], torch.tensor(ids), torch.ones(2, 1))
    trainer.close()
    assert servers.tables == {2**62: 1.0, -5: 3.0}
    assert len(servers.row_pushes) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_pushes_run_at_once_as_there_are_threads(opened: Make, threads: int) -> None:
    names = [f"w{i}" for i in range(5)]
    servers = FakeServers({name: torch.zeros(2, dtype=torch.float64) for name in names})
    arrived, release = threading.Semaphore(0), threading.Event()

    def hold(variable: str) -> None:
        arrived.release()
        assert release.wait(WAIT_S)

    servers.before_push = hold
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, thread_pool_size=threads))
    for name in names:
        trainer.send(f"{name}@GRAD", [name], [0], ones())
    for _ in range(threads):
        assert arrived.acquire(timeout=WAIT_S)
    assert not arrived.acquire(timeout=0.05)
    release.set()
    trainer.close()
    assert servers.most_at_once == threads
    assert len(servers.pushes) == len(names)


def test_pushes_of_one_variable_follow_one_another(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, thread_pool_size=4, send_queue_size=50))
    for i in range(50):
        trainer.send("w@GRAD", ["w"], [0], ones(float(i)))
    trainer.close()
    assert servers.most_at_once == 1
    assert [float(value[0]) for _, value in servers.pushes] == list(range(50))


def test_close_sends_everything_that_waits_and_then_leaves(opened: Make) -> None:
    servers = FakeServers(zeros())
    gate = servers.before_push = Gate()
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, send_queue_size=9, merge_wait_s=1e6))
    for _ in range(9):
        trainer.send("w@GRAD", ["w"], [0], ones())
    thread, errors = in_thread(trainer.close)
    assert not servers.is_closed
    gate.opened.set()
    joined(thread)
    assert not errors
    assert servers.values["w"].tolist() == [-9, -9]
    assert servers.is_closed


def test_recv_pulls_first_and_is_kept_up_to_date_from_then_on(opened: Make) -> None:
    servers = FakeServers({"w": torch.full((2,), 5.0, dtype=torch.float64)})
    trainer = opened(AsyncCommunicator, servers)
    first, second = ones(0.0), ones(0.0)
    trainer.recv("w", ["w"], [0], first)
    trainer.recv("w", ["w"], [0], second)  # another scope's
    assert first[0].tolist() == second[0].tolist() == [5, 5]
    trainer.send("w@GRAD", ["w"], [0], ones())
    until(lambda: first[0].tolist() == [4, 4] and second[0].tolist() == [4, 4])
    before = len(servers.calls)
    trainer.recv("w", ["w"], [0], first)
    assert len(servers.calls) == before  # no call


def test_memory_that_is_gone_is_not_written_to(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers)
    kept = ones(0.0)
    trainer.recv("w", ["w"], [0], kept)
    for _ in range(100):
        trainer.recv("w", ["w"], [0], ones(0.0))  # as for a parameter on a GPU: a copy each time
    assert len(trainer._destinations.of("w")) == 1


def test_parameters_are_pulled_only_after_enough_sends(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, min_send_grad_num_before_recv=2))
    mine = ones(0.0)
    trainer.recv("w", ["w"], [0], mine)
    for _ in range(2):
        trainer.send("w@GRAD", ["w"], [0], ones())
    until(lambda: len(servers.pushes) == 2)
    assert servers.calls.count("recv w") == 1
    trainer.send("w@GRAD", ["w"], [0], ones())
    until(lambda: mine[0].tolist() == [-3, -3])


def test_without_a_recv_thread_each_push_is_followed_by_a_pull(opened: Make) -> None:
    servers = FakeServers(zeros())
    settings = replace(SETTINGS, independent_recv_thread=False, min_send_grad_num_before_recv=100)
    trainer = opened(AsyncCommunicator, servers, settings)
    mine = ones(0.0)
    trainer.recv("w", ["w"], [0], mine)
    trainer.send("w@GRAD", ["w"], [0], ones())
    trainer.close()
    assert servers.calls == ["recv w", "send w@GRAD", "recv w"]
    assert mine[0].tolist() == [-1, -1]


@pytest.mark.parametrize("kind", [AsyncCommunicator, HalfAsyncCommunicator])
def test_an_error_in_the_background_ends_the_next_call_by_name(opened: Make, kind: Any) -> None:
    servers = FakeServers(zeros())
    servers.before_push = away
    trainer = opened(kind, servers)
    trainer.send("w@GRAD", ["w"], [0], ones())
    until(lambda: trainer._failure.happened)
    with pytest.raises(Unavailable, match=r"w@GRAD.*host:1") as raised:
        trainer.recv("w", ["w"], [0], ones())
    assert raised.value.endpoint == "host:1"
    with pytest.raises(Unavailable, match=r"w@GRAD"):
        trainer.send("v@GRAD", ["v"], [0], ones())


def test_who_waits_for_room_hears_of_an_error(opened: Make) -> None:
    servers = FakeServers(zeros())
    gate = Gate()

    def held_then_away(variable: str) -> None:
        gate(variable)
        away(variable)

    servers.before_push = held_then_away
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, send_queue_size=1))
    trainer.send("w@GRAD", ["w"], [0], ones())
    assert gate.arrived.acquire(timeout=WAIT_S)
    trainer.send("w@GRAD", ["w"], [0], ones())
    thread, errors = in_thread(lambda: trainer.send("w@GRAD", ["w"], [0], ones()))
    gate.opened.set()
    joined(thread)
    assert isinstance(errors[0], Unavailable)


def test_an_error_that_nobody_has_seen_is_raised_at_close(opened: Make) -> None:
    servers = FakeServers(zeros())
    servers.before_push = away
    trainer = opened(AsyncCommunicator, servers)
    trainer.send("w@GRAD", ["w"], [0], ones())
    with pytest.raises(Unavailable, match="w@GRAD"):
        trainer.close()
    assert servers.is_closed


def test_what_is_no_error_of_the_exchange_surfaces_too(opened: Make) -> None:
    trainer = opened(AsyncCommunicator, FakeServers(zeros()))
    trainer.send("w@GRAD", ["nowhere"], [0], ones())
    with pytest.raises(Bug, match="KeyError"):
        trainer.close()


def test_flush_sends_what_waits_and_merges_go_on(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, max_merge_var_num=3, merge_wait_s=1e6))
    for value in (1.0, 2.0):
        trainer.send("w@GRAD", ["w"], [0], ones(value))
    trainer.flush()
    assert [value.tolist() for _, value in servers.pushes] == [[3, 3]]
    trainer.send("w@GRAD", ["w"], [0], ones())
    assert trainer.queue_depths() == {"w@GRAD": 1}, "not sent alone"


def test_a_flush_that_fails_raises(opened: Make) -> None:
    servers = FakeServers(zeros())
    servers.before_push = away
    trainer = opened(AsyncCommunicator, servers, replace(SETTINGS, max_merge_var_num=3, merge_wait_s=1e6))
    trainer.send("w@GRAD", ["w"], [0], ones())
    with pytest.raises(Unavailable, match="host:1 is away"):
        trainer.flush()
