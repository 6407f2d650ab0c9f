"""Half-async threads whose whole steps meet in native code: one push for all, what one thread reads all read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import Job, Start, dense_step, jobs
from tests.ps.communicator_harness import in_thread, joined
from tests.support.waiting import until

from penstock.errors import Unavailable
from penstock.ps.communicator import remotes
from penstock.ps.remote import Remote
from penstock.ps.storage import Gradient


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield begin


def threads_of(job: Job, num: int) -> Any:
    half: Any = remotes.get(job.remotes[0])
    half.set_participants(num)
    return half


def trained_by(job: Job, half: Any, steps: Sequence[int], *, leaves: bool = True) -> list[list[Any]]:
    """Train with a thread for each number of steps; return what each has read. Without `leaves` they just end."""
    seen: list[list[Any]] = [[] for _ in steps]

    def train(who: int) -> None:
        for step in range(steps[who]):
            seen[who].append([t.tolist() for t in job.step(100 * who + step)])
        if leaves:
            half.leave()

    for thread, errors in [in_thread(lambda who=who: train(who)) for who in range(len(steps))]:  # type: ignore[misc]
        joined(thread)
        assert not errors
    return seen


@pytest.mark.parametrize("local", [True, False])
def test_steps_of_threads_are_those_that_meet_in_python(start: Start, *, local: bool) -> None:
    expected = start("half_async", by_python=True)
    in_python = trained_by(expected, threads_of(expected, 2), [5, 5])
    job = start("half_async", shared_memory=local)
    assert trained_by(job, threads_of(job, 2), [5, 5]) == in_python
    assert job.everything() == expected.everything()
    assert job.steps[0] == 0, "no step was made by Python"
    assert [job.storages[i].steps[f"w.block{i}"] for i in range(2)] == [5, 5], "one push a round"


def test_a_round_pushes_the_mean_of_those_that_take_part(start: Start) -> None:
    job = start("half_async")
    half, pushed = threads_of(job, 3), list[float]()
    update = job.storages[0].update

    def noted(block: str, gradient: Gradient) -> None:
        pushed.append(float(gradient.values[0, 0]))
        update(block, gradient)

    job.storages[0].update = noted  # type: ignore[method-assign]

    def train(who: int, steps: int) -> None:
        with half.participant():
            for _ in range(steps):
                dense_step(job, [float(who + 1)])

    for thread, errors in [in_thread(lambda w=w, n=n: train(w, n)) for w, n in enumerate((2, 5, 9))]:  # type: ignore[misc]
        joined(thread)
        assert not errors
    assert pushed == [2.0] * 2 + [2.5] * 3 + [3.0] * 4


def test_a_thread_that_ends_without_leaving_is_not_waited_for(start: Start) -> None:
    job = start("half_async")
    trained_by(job, threads_of(job, 2), [1, 4], leaves=False)
    assert job.storages[0].steps["w.block0"] == 4


@pytest.mark.parametrize("local", [True, False])
def test_a_round_whose_answer_is_lost_is_applied_once(start: Start, *, local: bool) -> None:
    expected = start("half_async", by_python=True)
    in_python = trained_by(expected, threads_of(expected, 2), [5, 5])
    job = start("half_async", shared_memory=local)
    half, apply, breaks = threads_of(job, 2), job.storages[1].update_all, [3]

    def applied(gradients: Any) -> None:
        apply(gradients)
        breaks[0] -= 1
        if not breaks[0]:
            job.clients[0]._session.disarm(1)  # while the round's answer is waited for

    job.storages[1].update_all = applied  # type: ignore[method-assign]
    assert trained_by(job, half, [5, 5]) == in_python
    assert job.everything() == expected.everything()
    assert job.steps[0] == 1, "Python repeated the push, and the next round went over channels again"


def test_without_channels_python_pushes_for_all(start: Start) -> None:
    expected = start("half_async", by_python=True)
    in_python = trained_by(expected, threads_of(expected, 2), [3, 3])
    job = start("half_async")
    half = threads_of(job, 2)
    job.clients[0]._arm = lambda: None  # type: ignore[method-assign]
    for at in (0, 1):
        job.clients[0]._session.disarm(at)
    assert trained_by(job, half, [3, 3]) == in_python
    assert job.everything() == expected.everything()
    assert job.steps[0] == 3


def test_a_push_that_fails_ends_the_steps_of_all_threads(start: Start) -> None:
    job = start("half_async", deadline_s=1.0)
    half = threads_of(job, 2)
    trained_by(job, half, [1, 1], leaves=False)
    half.set_participants(2)
    for server in job.servers:
        server.close()
    threads = [in_thread(lambda who=who: job.step(who)) for who in range(2)]  # type: ignore[misc]
    for thread, _ in threads:
        joined(thread)
    for _, errors in threads:
        assert [type(error) for error in errors] == [Unavailable]


def test_threads_that_push_other_variables_are_an_error(start: Start) -> None:
    job = start("half_async")
    threads_of(job, 2)
    threads = [in_thread(lambda: job.step(0)), in_thread(lambda: dense_step(job, [1.0]))]
    for thread, _ in threads:
        joined(thread)
    texts = [str(error) for _, errors in threads for error in errors]
    assert len(texts) == 2
    assert any("threads of one trainer push gradients of different variables" in text for text in texts)


def test_stopping_pushes_what_a_thread_has_brought(start: Start) -> None:
    job = start("half_async")
    half = threads_of(job, 2)
    thread, errors = in_thread(lambda: dense_step(job, [1.0]))
    until(lambda: half.queue_depths() == {"w.block0": 1})
    half.servers.end_threads()
    joined(thread)
    assert not errors and job.storages[0].steps["w.block0"] == 1


def test_a_thread_that_never_comes_is_an_error(start: Start) -> None:
    job = start("half_async")
    half = threads_of(job, 2)
    half._missing_s = 0.0
    with pytest.raises(Unavailable, match=r"1 of the 2 training threads .* have not begun within 0 s"):
        half.check_threads(1, 10.0)
    half.check_threads(2, 10.0)


def test_reads_by_themselves_see_what_threads_have_pushed(start: Start) -> None:
    job = start("half_async")
    half: Remote = threads_of(job, 2)
    found = []
    for step in range(2):
        trained_by(job, half, [1, 1], leaves=False)
        out = [torch.empty(3, 4)]
        half.recv("w", ["w.block0"], [0], out)
        assert torch.equal(out[0], job.storages[0].values["w.block0"]), step
        found.append(out[0])
        half.set_participants(2)  # type: ignore[attr-defined]  # half-async
    assert not torch.equal(*found)


def test_threads_of_two_beginnings_do_not_count_for_each_other(start: Start) -> None:
    job = start("half_async")
    half, ended = threads_of(job, 2), threading.Event()
    began = [threading.Event(), threading.Event()]

    def stays(who: int) -> None:
        dense_step(job, [1.0])
        began[who].set()
        assert ended.wait(60)

    first = [in_thread(lambda who=who: stays(who)) for who in range(2)]  # type: ignore[misc]
    assert all(one.wait(60) for one in began)
    half.set_participants(2)
    second, errors = in_thread(lambda: dense_step(job, [1.0]))
    until(lambda: half.queue_depths() == {"w.block0": 1})
    ended.set()
    for thread, _ in first:
        joined(thread)
    assert second.is_alive() and not errors, "those of before have no part in this round"
    dense_step(job, [1.0])
    joined(second)
    assert not errors and job.storages[0].steps["w.block0"] == 2
