"""Rounds that end while a trainer waits in a meeting that fails, or is interrupted: it goes on with the open one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from tests.ps.channel_jobs import Job, Start, jobs
from tests.ps.killable_server import SHAPES, TABLES
from tests.ps.test_next_rows_after_failures import (
    Interrupted,
    client_of,
    looked_up,
    rows_of,
    step,
    step_with_rows_ahead,
)
from tests.ps.torch_storage import TorchStorage
from tests.support.waiting import until

from penstock.errors import PeerError
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import remotes
from penstock.ps.rounds.sync import SyncRounds


@pytest.fixture
def begin() -> Iterator[Start]:
    with jobs() as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


def machine_of(job: Job, server: int) -> SyncRounds:
    machine = job.servers[server]._dispatcher.machine
    assert isinstance(machine, SyncRounds)
    return machine


def until_waiting(job: Job, trainer: int) -> None:
    def waits() -> bool:
        return all(trainer in machine_of(job, at).meetings.waiting for at in range(len(job.servers)))

    until(waits, "the trainer waits in the meeting")


@contextmanager
def interrupted_while_waiting(job: Job, trainer: int) -> Iterator[None]:
    """Send this thread, the main one, a signal whose handler raises, once the trainer waits in a meeting."""

    def raises(*_: object) -> None:
        raise Interrupted

    def interrupt() -> None:
        until_waiting(job, trainer)
        os.kill(os.getpid(), signal.SIGUSR1)

    before, sender = signal.signal(signal.SIGUSR1, raises), threading.Thread(target=interrupt)
    try:
        sender.start()
        with pytest.raises(Interrupted):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def with_rows_ahead(begin: Start, pool: ThreadPoolExecutor) -> Job:
    """Return a job of two trainers, which have the rows of their next step."""
    job = begin("sync", trainers=2, stored=[TorchStorage(SHAPES, TABLES)])
    list(pool.map(remotes.get, job.remotes))
    for seed in (0, 1):
        list(pool.map(step, job.remotes, [seed, seed + 10]))
    list(pool.map(step_with_rows_ahead, job.remotes, [2, 12]))
    return job


def takes_part(job: Job, pool: ThreadPoolExecutor, *, taken: int) -> None:
    """Check that the late trainer's next step has the rows of the open round, and is in it."""
    (storage,), (late, _) = job.storages, job.remotes
    now = rows_of(storage)
    assert looked_up(late).tolist() == now
    assert client_of(late)._session.num_taken == taken
    rounds = storage.rounds
    read = list(pool.map(step, job.remotes, [5, 15]))
    assert [of[0] for of in read] == [now] * 2
    assert storage.rounds == rounds + 1, "both are in one round"
    assert read[0][1] == read[1][1] == storage.values["w"].tolist()


@pytest.mark.timeout(120)
def test_a_meeting_of_parts_that_do_not_fit(begin: Start, pool: ThreadPoolExecutor) -> None:
    job = with_rows_ahead(begin, pool)
    late, other = job.remotes
    taken = client_of(late)._session.num_taken
    met = pool.submit(client_of(late).meet, torch.zeros(2))
    until_waiting(job, 0)
    step(other, 13)
    step(other, 14)
    with pytest.raises(PeerError, match="have to bring the same"):
        client_of(other).meet(torch.zeros(3))
    with pytest.raises(PeerError, match="have to bring the same"):
        met.result(60)
    assert client_of(late)._session.round(0) == machine_of(job, 0).round
    takes_part(job, pool, taken=taken)


@pytest.mark.timeout(120)
def test_a_meeting_that_is_interrupted(begin: Start, pool: ThreadPoolExecutor) -> None:
    job = with_rows_ahead(begin, pool)
    late, other = job.remotes
    client, taken = client_of(late), client_of(late)._session.num_taken
    with interrupted_while_waiting(job, 0):
        client.meet(torch.ones(1))
    assert not machine_of(job, 0).meetings.waiting
    ahead = pool.submit(step, other, 13)
    until(lambda: 1 in machine_of(job, 0)._reached, "the other is at the barrier")
    assert machine_of(job, 0).waits_for() == [0]
    step(late, 3)
    ahead.result(60)
    taken = client._session.num_taken
    takes_part(job, pool, taken=taken)
    met = pool.map(lambda remote: client_of(remote).meet(torch.full((1,), 2.0)), job.remotes)
    assert list(met) == [torch.tensor([4.0])] * 2, "what it brought before is forgotten"


@pytest.mark.timeout(120)
def test_an_interrupt_ends_the_waits_at_all_servers(begin: Start, pool: ThreadPoolExecutor) -> None:
    job = begin("sync", trainers=2)
    list(pool.map(remotes.get, job.remotes))
    list(pool.map(job.step, [0, 10], [0, 1]))
    with interrupted_while_waiting(job, 0):
        client_of(job.remotes[0]).meet(None)
    assert not any(machine_of(job, server).meetings.waiting for server in (0, 1))
    rounds = [machine_of(job, server).round for server in (0, 1)]
    list(pool.map(job.step, [1, 11], [0, 1]))
    assert [machine_of(job, server).round for server in (0, 1)] == [number + 1 for number in rounds]


@pytest.mark.timeout(120)
def test_a_meeting_that_fails_at_one_of_two_servers(begin: Start, pool: ThreadPoolExecutor) -> None:
    job = begin("sync", trainers=2)
    list(pool.map(remotes.get, job.remotes))
    for seed in (0, 1):
        list(pool.map(job.step, [seed, seed + 10], [0, 1]))
    late, other = (client_of(remote) for remote in job.remotes)
    met = pool.submit(late.meet, torch.zeros(2))
    until_waiting(job, 0)
    job.step(30, 1)
    job.step(31, 1)
    with pytest.raises(PeerError):
        other.meet(torch.zeros(3))
    with pytest.raises(PeerError):
        met.result(60)
    assert rounds_of(late) == rounds_of(other) == [machine_of(job, server).round for server in (0, 1)]
    before = rounds_of(late)
    list(pool.map(job.step, [40, 41], [0, 1]))
    assert rounds_of(late) == rounds_of(other) == [number + 1 for number in before]


def rounds_of(client: TrainerClient) -> list[int]:
    return [client._session.round(server) for server in (0, 1)]


@pytest.mark.timeout(120)
def test_a_server_that_does_not_answer_hides_no_error(begin: Start, pool: ThreadPoolExecutor) -> None:
    job = with_rows_ahead(begin, pool)
    late, other = (client_of(remote) for remote in job.remotes)
    (link,) = late.links
    call = link.route.call

    def unheard(message, **limits):  # type: ignore[no-untyped-def]
        if message.fields.get("number", 0) < -1:
            raise PeerError("nobody says so")
        return call(message, **limits)

    link.route.call = unheard  # type: ignore[method-assign]
    met = pool.submit(late.meet, torch.zeros(2))
    until_waiting(job, 0)
    with pytest.raises(PeerError, match="have to bring the same"):
        other.meet(torch.zeros(3))
    with pytest.raises(PeerError, match="have to bring the same"):
        met.result(60)
