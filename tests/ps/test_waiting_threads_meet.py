"""Half-async threads that wait in native code: what is pushed meanwhile, who has ended, what wakes them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import Job, Start, dense_step, jobs
from tests.ps.communicator_harness import in_thread, joined
from tests.support.waiting import LIMIT_S, until

from penstock.errors import Unavailable
from penstock.ps.communicator import remotes
from penstock.ps.storage import Gradient


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield begin


def half_of(job: Job, num_threads: int) -> Any:
    half: Any = remotes.get(job.remotes[0])
    half.set_participants(num_threads)
    return half


def noted_pushes(job: Job, during: Callable[[], object] = lambda: None) -> list[float]:
    """Return the list to which each push to the first server adds its value; `during` runs within the push."""
    pushed, update = list[float](), job.storages[0].update

    def noted(block: str, gradient: Gradient) -> None:
        pushed.append(float(gradient.values[0, 0]))
        during()
        update(block, gradient)

    job.storages[0].update = noted  # type: ignore[method-assign]
    return pushed


def begun(half: Any, job: Job, *values: float) -> list[tuple[threading.Thread, list[BaseException]]]:
    """Begin a thread for each value, which pushes it; return when all of them wait."""
    threads = [in_thread(lambda value=value: dense_step(job, [value])) for value in values]  # type: ignore[misc]
    until(lambda: half.queue_depths() == {"w.block0": len(values)})
    return threads


def ended_well(threads: list[tuple[threading.Thread, list[BaseException]]]) -> None:
    for thread, errors in threads:
        joined(thread)
        assert not errors


class HeldChecks:
    """Holds up the check that waiting threads make each second."""

    def __init__(self, half: Any) -> None:
        self.inside, self.opened, self._check = threading.Semaphore(0), threading.Event(), half.check_threads
        half.check_threads = self

    def __call__(self, num_came: int, waited_s: float) -> None:
        self.inside.release()
        assert self.opened.wait(LIMIT_S)
        self._check(num_came, waited_s)


@contextmanager
def held_checks(half: Any) -> Iterator[HeldChecks]:
    held = HeldChecks(half)
    try:
        yield held
    finally:
        held.opened.set()


@pytest.mark.parametrize("num_after", [0, 2])
def test_what_is_pushed_while_a_thread_checks_is_pushed_once(start: Start, num_after: int) -> None:
    job = start("half_async")
    half = half_of(job, 3)
    pushed = noted_pushes(job)
    with held_checks(half) as held:
        (first,) = begun(half, job, 1.0)
        assert held.inside.acquire(timeout=LIMIT_S)
        second = in_thread(lambda: dense_step(job, [3.0]))
        until(lambda: half.queue_depths() == {"w.block0": 2})
        third = in_thread(lambda: dense_step(job, [5.0]))
        joined(third[0])  # completes the round, whose first thread still checks
        half.set_participants(num_after)
    ended_well([first, second, third])
    assert pushed == [3.0] and half.queue_depths() == {}


def test_a_flush_longer_than_a_wait_pushes_each_gradient_once(start: Start) -> None:
    job = start("half_async")
    half, never = half_of(job, 3), threading.Event()
    pushed = noted_pushes(job, lambda: never.wait(2.5))  # more than two checks
    threads = begun(half, job, 1.0, 3.0)
    half.set_participants(2)
    ended_well(threads)
    assert pushed == [2.0] and half.queue_depths() == {}, "nobody brings the gradient to the next round again"


def test_stopping_pushes_what_a_thread_that_checks_has_brought(start: Start) -> None:
    job = start("half_async")
    half = half_of(job, 2)
    pushed = noted_pushes(job)
    with held_checks(half) as held:
        threads = begun(half, job, 1.0)
        assert held.inside.acquire(timeout=LIMIT_S)
        closing, errors = in_thread(half.servers.end_threads)
        assert closing.is_alive(), "waits for the gradient"
    joined(closing)
    ended_well([*threads, (closing, errors)])
    assert pushed == [1.0]


def test_a_check_that_raises_takes_the_gradient_back(start: Start) -> None:
    job = start("half_async")
    half = half_of(job, 2)
    half._missing_s = 0.5
    pushed = noted_pushes(job)
    ((thread, errors),) = begun(half, job, 1.0)
    joined(thread)
    assert [type(error) for error in errors] == [Unavailable] and "have not begun" in str(errors[0])
    assert half.queue_depths() == {}
    half.set_participants(0)
    assert pushed == []


def test_a_failure_elsewhere_wakes_threads_that_wait(start: Start) -> None:
    job = start("half_async")
    half = half_of(job, 2)
    threads = begun(half, job, 1.0)
    half.check_threads = lambda num_came, waited_s: num_came >= 0 or half._check()  # none of each second
    half._fail("sending the gradient 'v'", Unavailable("the server is gone"))
    for thread, errors in threads:
        joined(thread)
        assert ["sending the gradient 'v' failed" in str(error) for error in errors] == [True]
    assert half.queue_depths() == {}


TRAINER = """
import sys, threading
import torch
from tests.ps.channel_jobs import dense_step_of
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import communicate, remotes
from penstock.ps.remote import Descriptor
from penstock.ps.settings import TrainerSettings

def opened(descriptor):
    client = TrainerClient(descriptor, TrainerSettings(epoch=1))
    client.connect()
    return communicate(client)

remotes.opener = opened
remote = sys.argv[1]
remotes.get(remote).set_participants(2)
"""
ENDS_FIRST = f"""{TRAINER}
def train():
    for step in range(3):
        dense_step_of(remote, [3.0])
    print("trained", flush=True)

threading.Thread(target=train).start()
dense_step_of(remote, [1.0])
if sys.argv[2] == "raises":
    raise SystemExit(3)
"""
INTERRUPTED = f"""{TRAINER}
stays = threading.Event()

def train():
    dense_step_of(remote, [3.0])
    while not remotes.get(remote).queue_depths():  # until the main thread waits for this one
        stays.wait(0.01)
    print("waits", flush=True)
    stays.wait()

thread = threading.Thread(target=train)
thread.start()
try:
    dense_step_of(remote, [1.0])
    dense_step_of(remote, [1.0])
except KeyboardInterrupt:
    print("interrupted", remotes.get(remote).queue_depths(), flush=True)
stays.set()
thread.join()
"""


@contextmanager
def trainer(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # one that still runs has failed the test


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 3)])
def test_a_main_thread_that_ends_first_is_not_waited_for(start: Start, how: str, code: int) -> None:
    job = start("half_async")
    pushed = noted_pushes(job)
    with trainer(ENDS_FIRST, job.remotes[0], how) as process:
        output, _ = process.communicate(timeout=2 * LIMIT_S)
    assert (output, process.returncode) == ("trained\n", code)
    assert pushed == [2.0, 3.0, 3.0]


def test_a_main_thread_that_waits_can_be_interrupted(start: Start) -> None:
    job = start("half_async")
    pushed = noted_pushes(job)
    with trainer(INTERRUPTED, job.remotes[0]) as process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=2 * LIMIT_S)
    assert (output, process.returncode) == ("interrupted {}\n", 0)
    assert pushed == [2.0]


def test_a_thread_without_step_is_not_taken_for_the_main_thread(start: Start) -> None:
    job = start("half_async")
    half = half_of(job, 2)
    threads = begun(half, job, 1.0)
    half.servers.leave_threads_for(threading.get_native_id())  # has not come
    assert half.queue_depths() == {"w.block0": 1}
    assert torch.equal(torch.tensor(dense_step(job, [3.0])), job.storages[0].values["w.block0"][0])
    ended_well(threads)
