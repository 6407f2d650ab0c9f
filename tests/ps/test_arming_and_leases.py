"""Trainers whose lease is not their server's, and trainers that are lost while their channels are opened."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.ps.channel_jobs import Start, jobs
from tests.ps.small_server import SmallServer
from tests.ps.test_next_rows_after_failures import IDS, client_of, looked_up, step
from tests.ps.test_rounds_end_during_meetings import machine_of, with_rows_ahead
from tests.support.waiting import until
from torch import zeros

from penstock.ps.client import TrainerClient
from penstock.ps.communicator import remotes
from penstock.ps.remote import Descriptor
from penstock.ps.settings import TrainerSettings


@pytest.fixture
def begin() -> Iterator[Start]:
    with jobs() as made:
        yield made


@pytest.mark.timeout(120)
@pytest.mark.parametrize("own_s", [1.5, 600.0])
def test_the_shorter_lease_is_followed(begin: Start, own_s: float) -> None:
    job = begin("sync", trainers=1, lease_s=3.0)
    job.settings["lease_s"] = own_s
    client = client_of(job.remotes[0])
    assert [link.lease_s for link in client.links] == [min(own_s, 3.0)] * 2
    members = [machine_of(job, server).members._members for server in (0, 1)]
    before = [of[0].seen_at for of in members]
    until(lambda: all(0 in of and of[0].seen_at > at for of, at in zip(members, before, strict=True)), "heartbeats")


def test_a_server_that_names_no_lease_has_the_trainers_own() -> None:
    """As one of the version before."""
    server = SmallServer({"w": zeros(2)}, lease_s=1.0)
    client = TrainerClient(Descriptor("sync", 0, 1, (server.endpoint,)), TrainerSettings(epoch=1, lease_s=30.0))
    try:
        client.connect()
        assert client.links[0].lease_s == 30.0
    finally:
        client.close()
        server.close()


@pytest.mark.timeout(120)
def test_rows_are_not_taken_when_the_lease_of_the_server_ran_out(begin: Start) -> None:
    """The trainer's own lease is longer."""

    def with_short_lease(*args: Any, **settings: Any) -> Any:
        job = begin(*args, lease_s=3.0, **settings)
        job.settings["lease_s"] = 600.0
        return job

    with ThreadPoolExecutor(2) as pool:
        job = with_rows_ahead(with_short_lease, pool)
        (storage,), (late, other) = job.storages, job.remotes
        client = client_of(late)
        client.links[0].heartbeat_is_due = lambda: False  # type: ignore[method-assign]  # as if it were stopped
        taken = client._session.num_taken
        step(other, 13)  # its round is without the trainer that is lost
        step(other, 14)
        found = looked_up(late)
        assert client._session.num_taken == taken
        assert found.tolist() == storage.rows("t", IDS, create=False).tolist()


@pytest.mark.timeout(120)
def test_a_trainer_is_armed_under_the_join_in_force(begin: Start) -> None:
    job = begin("sync", trainers=2, lease_s=20.0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(remotes.get, job.remotes))
        list(pool.map(job.step, [0, 10], [0, 1]))
        client = client_of(job.remotes[0])
        link = client.links[0]
        client._session.disarm(0)
        open_channel, before = link.route.open_channel, link.round

        def slow(*args: Any, **limits: Any) -> Any:
            link.route.open_channel = open_channel  # type: ignore[method-assign]
            ahead = pool.submit(job.step, 11, 1)  # the round waits for this trainer, until it is lost
            machine = machine_of(job, 0)
            until(lambda: 1 in machine._reached, "the other is at the barrier")
            with job.servers[0]._dispatcher.frozen():
                machine.members._members[0].seen_at = -1e9
            until(lambda: 0 not in machine.members._members, "the trainer is lost")
            link._lost(link._joined_as, breaks=False)
            link.join(30.0)
            with job.servers[1]._dispatcher.frozen():
                machine_of(job, 1).members._members[0].seen_at = -1e9
            ahead.result(60)
            return open_channel(*args, **limits)

        link.route.open_channel = slow  # type: ignore[method-assign]
        link.arm()
        assert not client._session.is_armed_at(0), "what was opened is of a join before"
        link.arm()
        assert client._session.is_armed_at(0)
        assert client._session.round(0) == before + 1 == machine_of(job, 0).round
