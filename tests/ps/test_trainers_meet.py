"""Meetings of trainers at real servers: sums, lost trainers, lost answers, servers that are started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.proxy import Proxy
from tests.ps.torch_storage import TorchStorage
from tests.support.endpoints import free_endpoint

from penstock.errors import PeerError
from penstock.ps.client import TrainerClient
from penstock.ps.remote import Descriptor, PsMode
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings, TrainerSettings
from penstock.ps.storage import Gradient

LEASE_S = 4.0


class Job:
    """Servers and clients of one test."""

    def __init__(self) -> None:
        self.servers: list[ParameterServer] = []
        self.clients: list[TrainerClient] = []

    def serve(self, mode: PsMode, of: int, *, endpoint: str = "127.0.0.1:0", state: Path | None = None) -> str:
        settings = ServerSettings(endpoint, 0, of, mode, lease_s=LEASE_S, state_dir=state)
        server = ParameterServer(settings, TorchStorage({"w": (2,)}, sync=mode == "sync"))
        self.servers.append(server)
        server.start()
        return f"127.0.0.1:{server.port}"

    def trainer(self, mode: PsMode, trainer: int, of: int, *endpoints: str, local: bool = True) -> TrainerClient:
        settings = TrainerSettings(epoch=1, lease_s=LEASE_S, shared_memory=local)
        client = TrainerClient(Descriptor(mode, trainer, of, endpoints), settings)
        self.clients.append(client)
        client.connect()
        return client


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda client: client.close(), job.clients))
    for server in job.servers:
        server.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls at the same time; return what they gave, or raised."""

    def made(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PeerError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(made, calls))


def total(client: TrainerClient, num: int) -> list[float]:
    """Meet with so many ones; return the sum."""
    found = client.meet(torch.ones(num))
    assert found is not None
    values: list[float] = found.tolist()
    return values


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_all_get_the_sum_of_what_all_bring_as_often_as_they_meet(job: Job, mode: PsMode) -> None:
    endpoints = [job.serve(mode, 3) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        clients = list(pool.map(lambda t: job.trainer(mode, t, 3, *endpoints), range(3)))
    for meeting in range(3):
        parts = [torch.arange(5, dtype=torch.float64) * (10**t) + meeting for t in range(3)]
        calls = [partial(client.meet, part) for client, part in zip(clients, parts, strict=True)]
        assert [found.tolist() for found in together(*calls)] == [sum(parts).tolist()] * 3
    assert together(*(partial(client.meet, None) for client in clients)) == [None] * 3


def test_parts_that_do_not_fit_each_other_are_an_error_for_all(job: Job) -> None:
    endpoint = job.serve("async", 2)
    a, b = (job.trainer("async", t, 2, endpoint) for t in range(2))
    reasons = together(partial(a.meet, torch.zeros(3)), partial(b.meet, torch.zeros(3, 1)))
    assert all("torch.float32[3, 1], torch.float32[3]; all have to bring the same" in reason for reason in reasons)
    assert together(partial(a.meet, None), partial(b.meet, None)) == [None, None]


def test_a_lost_worker_releases_the_others_when_its_lease_ends(job: Job) -> None:
    endpoint = job.serve("sync", 2)
    client = job.trainer("sync", 0, 2, endpoint)
    lost = TrainerClient(Descriptor("sync", 1, 2, (endpoint,)), TrainerSettings(epoch=1))
    job.clients.append(lost)
    lost.links[0].heartbeat_is_due = lambda: False  # type: ignore[method-assign]
    lost.connect()
    assert together(partial(client.meet, None), partial(lost.meet, None)) == [None, None]
    assert total(client, 2) == [1.0, 1.0]
    assert total(lost, 2) == [1.0, 1.0], "it was not there, and hears what the others heard"
    assert together(partial(total, client, 1), partial(total, lost, 1)) == [[2.0], [2.0]]


def test_a_lost_answer_is_repeated_and_counts_no_trainer_twice(job: Job) -> None:
    endpoint = job.serve("async", 2)
    proxy = Proxy(int(endpoint.rpartition(":")[2]))
    try:
        cut = job.trainer("async", 0, 2, proxy.endpoint, local=False)
        other = job.trainer("async", 1, 2, endpoint)
        assert together(partial(cut.meet, None), partial(other.meet, None)) == [None, None]
        proxy.mute.set()
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(total, cut, 2)
            assert total(other, 2) == [2.0, 2.0]
            assert proxy.muted.wait(60)
            proxy.lose()
            assert met.result(60) == [2.0, 2.0]
        assert together(partial(total, cut, 1), partial(total, other, 1)) == [[2.0], [2.0]]
    finally:
        cut.close()
        proxy.close()


def test_who_waits_is_met_at_a_server_that_was_started_again(job: Job, tmp_path: Path) -> None:
    endpoint = job.serve("async", 2, endpoint=free_endpoint(), state=tmp_path)
    a, b = (job.trainer("async", t, 2, endpoint) for t in range(2))
    assert together(partial(a.meet, None), partial(b.meet, None)) == [None, None]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(total, a, 1)
        while not job.servers[0]._dispatcher.machine.meetings.waiting:
            assert not waiting.done()
        job.servers[0].close()
        job.serve("async", 2, endpoint=endpoint, state=tmp_path)
        assert total(b, 1) == [2.0]
        assert waiting.result(60) == [2.0]


def test_trainers_of_unequal_data_meet_at_the_end_and_continue(job: Job) -> None:
    endpoints = [job.serve("sync", 2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(lambda t: job.trainer("sync", t, 2, *endpoints), range(2))

    def train(client: TrainerClient, steps: int) -> list[float]:
        out = torch.empty(2)
        for _ in range(steps):
            client.send("w", ["w"], [1], [torch.ones(2)])
            client.send_barrier()
            client.recv("w", ["w"], [1], [out])
        client.meet(None)
        client.send("w", ["w"], [1], [torch.full((2,), 4.0 * (client is a))])
        client.send_barrier()
        client.recv("w", ["w"], [1], [out])
        return out.tolist()

    ours = together(partial(train, a, 1), partial(train, b, 4))
    alone = TorchStorage({"w": (2,)})
    for value in (1.0, 1.0, 1.0, 1.0, 2.0):  # the last: a mean of 4 and 0, so both took part
        alone.begin_round()
        alone.update("w", Gradient(torch.full((2,), value)))
    assert ours == [alone.values["w"].tolist()] * 2
