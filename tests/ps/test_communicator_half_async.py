"""Half-async: threads of one trainer in lock-step, whatever becomes of one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.ps.communicator_harness import WAIT_S, Gate, Make, away, communicators, in_thread, joined, ones, zeros
from tests.ps.fake_servers import FakeServers
from tests.support.waiting import until
from torch import Tensor

from penstock.errors import Unavailable
from penstock.ps.communicators.half_async import HalfAsyncCommunicator
from penstock.ps.remote import SendCall


@pytest.fixture
def opened() -> Iterator[Make]:
    """Make communicators that are closed at the end."""
    with communicators() as make:
        yield make


def run_threads(trainer: Any, steps: list[int], trace: list[tuple[str, int, int]], parameters: list[Any]) -> None:
    """Train with one thread for each number of steps; each gives its gradient and takes the parameters."""
    lock = threading.Lock()

    def train(who: int) -> None:
        with trainer.participant():
            for step in range(steps[who]):
                with lock:
                    trace.append(("sends", who, step))
                trainer.send("w@GRAD", ["w"], [0], ones(float(who + 1)))
                trainer.recv("w", ["w"], [0], parameters[who])
                with lock:
                    trace.append(("received", who, step))

    started = [in_thread(lambda who=who: train(who)) for who in range(len(steps))]  # type: ignore[misc]
    for thread, errors in started:
        joined(thread)
        assert not errors


def test_threads_of_a_trainer_go_in_lock_step(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(3)
    trace: list[tuple[str, int, int]] = []
    parameters = [ones(0.0) for _ in range(3)]
    run_threads(trainer, [5, 5, 5], trace, parameters)
    for step in range(5):
        received = min(i for i, (what, _, s) in enumerate(trace) if (what, s) == ("received", step))
        assert {who for what, who, s in trace[:received] if (what, s) == ("sends", step)} == {0, 1, 2}
    assert [value.tolist() for _, value in servers.pushes] == [[2.0, 2.0]] * 5  # the average of 1, 2, 3
    assert servers.calls.count("recv w") == 5  # one pull a round, for all
    assert all(p[0].tolist() == [-10, -10] for p in parameters)


def test_threads_with_unequal_data_never_deadlock(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(3)
    run_threads(trainer, [2, 5, 9], [], [ones(0.0) for _ in range(3)])
    averages = [float(value[0]) for _, value in servers.pushes]
    assert averages == [2.0] * 2 + [2.5] * 3 + [3.0] * 4  # of those who took part


def test_a_thread_that_ends_silently_is_not_waited_for(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)

    def train(steps: int) -> None:
        for _ in range(steps):
            trainer.send("w@GRAD", ["w"], [0], ones())
            trainer.recv("w", ["w"], [0], ones())

    threads = [in_thread(lambda steps=steps: train(steps)) for steps in (1, 3)]  # type: ignore[misc]
    for thread, errors in threads:
        joined(thread)
        assert not errors
    assert len(servers.pushes) == 3


def test_the_threads_of_a_second_epoch_go_in_lock_step_too(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    for _ in range(2):
        trainer.set_participants(2)
        run_threads(trainer, [3, 3], [], [ones(0.0), ones(0.0)])
    assert [float(value[0]) for _, value in servers.pushes] == [1.5] * 6


def test_gradients_of_ended_threads_stay_out_of_the_next_epoch(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)
    thread, errors = in_thread(lambda: trainer.send("w@GRAD", ["w"], [0], ones(7.0)))  # the other one never gives
    joined(thread)
    assert not errors
    trainer.set_participants(2)
    run_threads(trainer, [3, 3], [], [ones(0.0), ones(0.0)])
    assert [float(value[0]) for _, value in servers.pushes] == [7.0] + [1.5] * 3


def test_one_send_a_step_pushes_and_pulls_in_each_step(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    mine = ones(0.0)
    for step in range(3):
        trainer.send("w@GRAD", ["w"], [0], ones())
        trainer.recv("w", ["w"], [0], mine)
        assert mine[0].tolist() == [-1.0 - step] * 2


def steps_of_two(trainer: Any, num_steps: int, parameters: list[list[Tensor]]) -> list[BaseException]:
    """Train with two threads, whose steps push and pull both variables; return their errors."""

    def train(who: int) -> None:
        with trainer.participant():
            for _ in range(num_steps):
                gradients = {"w": ones(who + 1.0), "v": ones(10.0 * who)}
                trainer.send_step([SendCall(f"{n}@GRAD", [n], [0], value) for n, value in gradients.items()])
                trainer.recv_step(["w", "v"], ["w", "v"], [0, 0], parameters[who])

    started = [in_thread(lambda who=who: train(who)) for who in (0, 1)]  # type: ignore[misc]
    for thread, _ in started:
        joined(thread)
    return [error for _, errors in started for error in errors]


def test_all_variables_of_a_round_are_one_push_and_one_pull(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)
    parameters = [[*ones(0.0), *ones(0.0)] for _ in range(2)]
    assert not steps_of_two(trainer, 5, parameters)
    assert [(n, v.tolist()) for n, v in servers.pushes] == [("w", [1.5] * 2), ("v", [5.0] * 2)] * 5, "averages"
    assert [[p.tolist() for p in mine] for mine in parameters] == [[[-7.5] * 2, [-25.0] * 2]] * 2
    assert servers.calls.count("send_step") == 5
    assert servers.calls.count("recv_step") == 4, (
        "of the first round each is pulled by itself, since it is not known yet"
    )


def test_threads_of_a_new_epoch_read_what_one_thread_has_pushed(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)
    parameters = [[*ones(0.0), *ones(0.0)] for _ in range(2)]
    assert not steps_of_two(trainer, 1, parameters)
    trainer.set_participants(1)
    trainer.send("w@GRAD", ["w"], [0], ones(100.0))
    trainer.set_participants(2)
    with trainer.participant():
        trainer.recv("w", ["w"], [0], parameters[0][:1])
    assert parameters[0][0].tolist() == [-101.5] * 2


def test_an_error_of_a_push_names_all_its_gradients(opened: Make) -> None:
    servers = FakeServers(zeros())

    def refuse(variable: str) -> None:
        if variable == "v@GRAD":
            raise Unavailable("the server is gone")

    servers.before_push = refuse
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)
    errors = steps_of_two(trainer, 1, [[*ones(0.0), *ones(0.0)] for _ in range(2)])
    expected = "sending the gradients 'w@GRAD', 'v@GRAD' to host:1 failed in the background: the server is gone"
    assert [str(error).split(" [")[0] for error in errors] == [expected] * 2


def test_operators_are_served_until_a_push_fails(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    served = [servers.serves_operators]
    for num in (2, 1):
        trainer.set_participants(num)
        served.append(servers.serves_operators)
        assert servers.num_threads == num
    servers.before_push = away
    trainer.send("w@GRAD", ["w"], [0], ones())
    served.append(servers.serves_operators)
    assert served == [True, True, True, False]
    with pytest.raises(Unavailable, match="w@GRAD"):
        trainer.close()


def test_what_threads_have_queued_is_sent_before_one_goes_on(opened: Make) -> None:
    servers = FakeServers(zeros())
    gate = servers.before_push = Gate()
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)
    trainer.send("w@GRAD", ["w"], [0], ones())
    waiting, errors = in_thread(lambda: trainer.set_participants(1))
    assert gate.arrived.acquire(timeout=WAIT_S)
    waiting.join(0.1)
    assert waiting.is_alive() and not servers.serves_operators
    gate.opened.set()
    joined(waiting)
    assert not errors and servers.serves_operators


def test_close_sends_a_round_that_was_not_complete(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(4)
    trainer.send("w@GRAD", ["w"], [0], ones())
    trainer.close()
    assert len(servers.pushes) == 1


def test_an_announced_thread_that_never_starts_is_an_error(opened: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = opened(HalfAsyncCommunicator, FakeServers(zeros()), missing_s=0.0)
    trainer.set_participants(3)
    trainer.send("w@GRAD", ["w"], [0], ones())
    with pytest.raises(Unavailable, match=r"2 of the 3 training threads .* have not begun within 0 s"):
        trainer.recv("w", ["w"], [0], ones(0.0))
    assert "2 of the 3 training threads" in caplog.text


def test_threads_that_all_arrived_are_awaited_without_limit(opened: Make) -> None:
    trainer = opened(HalfAsyncCommunicator, FakeServers(zeros()), missing_s=0.0)
    trainer.set_participants(2)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        trainer.recv("v", ["v"], [0], ones(0.0))  # it has come, and computes its step
        begun.set()
        assert go_on.wait(WAIT_S)
        trainer.send("w@GRAD", ["w"], [0], ones())

    other, other_errors = in_thread(slow)
    assert begun.wait(WAIT_S)
    waiting, errors = in_thread(lambda: (trainer.send("w@GRAD", ["w"], [0], ones()),
                                         trainer.recv("w", ["w"], [0], ones(0.0))))  # fmt: skip
    until(lambda: trainer.queue_depths().get("w") == 1)
    go_on.set()
    for thread in (other, waiting):
        joined(thread)
    assert not errors and not other_errors


def test_flush_sends_a_round_that_waits_for_others(opened: Make) -> None:
    servers = FakeServers(zeros())
    trainer = opened(HalfAsyncCommunicator, servers)
    trainer.set_participants(2)
    trainer.send("w@GRAD", ["w"], [0], ones())
    trainer.flush()
    assert [value.tolist() for _, value in servers.pushes] == [[1, 1]]
    trainer.send("w@GRAD", ["w"], [0], ones())
    assert trainer.queue_depths() == {"w": 1}, "rounds wait for both again"
