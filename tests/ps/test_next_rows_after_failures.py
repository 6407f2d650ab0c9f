"""Prefetched rows in sync mode, when answers, leases and servers are lost: those of an earlier round are not taken.

The oracle is what the server has: its table is compared with what a step looks up.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.channel_jobs import OPS, Start, jobs
from tests.ps.killable_server import SHAPES, TABLES, KillableServer
from tests.ps.proxy import Proxy
from tests.ps.torch_storage import TorchStorage
from tests.support.nursery import Forked, Nursery
from tests.support.remotes import remotes_of_a_test
from tests.support.waiting import until
from torch import Tensor

from penstock.errors import Unavailable
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import remotes
from penstock.ps.remote import Descriptor
from penstock.ps.settings import TrainerSettings

IDS = torch.tensor([3, -2, 11])
LOOK_UP: Any = (["t"], [0], [], 2, torch.float32, None)
SPEC = json.dumps({"dense": [["w", ["w"], [0], 1]], "sparse": [["t", ["t"], [0], []]]})


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield lambda **settings: begin("sync", stored=[TorchStorage(SHAPES, TABLES)], **settings)


def client_of(remote: str) -> TrainerClient:
    client = remotes.get(remote)
    assert isinstance(client, TrainerClient)
    return client


def num_calls(remote: str) -> int:
    """How many lookups and pushes of the table are answered, over channels."""
    return {block: sums["calls"] for block, sums in client_of(remote)._session.sums(0)}["t"]


def looked_up(remote: str) -> Tensor:
    found: Tensor = OPS.prefetch(IDS, remote, "t", *LOOK_UP)
    return found


def step(remote: str, seed: int) -> list[Any]:
    """Look up, push what depends on it, and read; return all that was read."""
    found, random = looked_up(remote), torch.Generator().manual_seed(seed)
    dense = torch.randn(3, 4, generator=random)
    sent = OPS.send_step([dense], [IDS], [found * 2 - 0.5], [], remote, SPEC)
    out = torch.empty(3, 4)
    OPS.recv_step([out], [sent], remote, ["w"], ["w"], [0])
    return [found.tolist(), out.tolist()]


def step_with_rows_ahead(remote: str, seed: int, *, wait: bool = True) -> list[Any]:
    """A step, after which the rows of the next one are looked up in the background. `wait`: until they have come."""
    client = client_of(remote)
    client.rows.begin_ahead()
    assert client.rows.prefetch_ahead("t", IDS)
    before, taken = num_calls(remote), client._session.num_taken
    found = step(remote, seed)
    own = 2 - (client._session.num_taken - taken)  # a lookup, or rows that are taken, and a push
    if wait:
        until(lambda: num_calls(remote) == before + own + 1, "the rows of the next step have come")
    return found


def rows_of(storage: TorchStorage) -> list[list[float]]:
    found: list[list[float]] = storage.rows("t", IDS, create=False).tolist()
    return found


# ---------------------------------------------------------------- a round whose end is not noticed


class Interrupted(BaseException):
    """As KeyboardInterrupt, which ends pytest."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["lost", "interrupted"])
def test_rows_are_not_taken_after_a_barrier_without_answer(start: Start, how: str) -> None:
    job = start(shared_memory=False, deadline_s=3.0)
    (storage,), (server,) = job.storages, job.servers
    proxy = Proxy(server.port)
    remote = job.remotes[0] = str(Descriptor("sync", 0, 1, (proxy.endpoint,)))
    apply = storage.update_all
    for seed in (0, 1):
        step(remote, seed)
    step_with_rows_ahead(remote, 2)
    client, before = client_of(remote), rows_of(storage)

    def applied(gradients: Any) -> None:
        apply(gradients)
        proxy.mute.set()

    route, barrier_of = client.links[0].route, client.links[0].route.call

    def interrupted(message: Any, **limits: Any) -> Any:
        answered = barrier_of(message, **limits)
        if message.kind in {"barrier", "step"}:
            answered.release()
            raise Interrupted
        return answered

    client.send("w", ["w"], [0], [torch.ones(3, 4)])
    client.send_rows("t", ["t"], [0], [], IDS, torch.ones(3, 2))
    if how == "lost":
        storage.update_all = applied  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            client.send_barrier()
        assert proxy.muted.is_set()
        storage.update_all = apply  # type: ignore[method-assign]
    else:
        route.call = interrupted  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            client.send_barrier()
        del route.call
    assert rows_of(storage) != before, "the round was applied"
    assert not client._session.take_next("t", IDS, torch.empty(3, 2))
    proxy.lose()
    assert looked_up(remote).tolist() == rows_of(storage)
    client.send_barrier()
    client._arm()
    rounds = storage.rounds
    for seed in (3, 4):
        expected = rows_of(storage)
        assert step_with_rows_ahead(remote, seed)[0] == expected
    assert storage.rounds == rounds + 2, "no round twice, and steps go on"
    assert client._session.num_taken == 1
    remotes.close(remote)
    proxy.close()


@pytest.mark.timeout(120)
def test_rows_are_not_taken_when_the_lease_ran_out(start: Start) -> None:
    """The other trainer's rounds go on meanwhile; this one knows nothing of it when it continues."""
    job = start(trainers=2, lease_s=3.0)
    (storage,), (late, other) = job.storages, job.remotes
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(remotes.get, job.remotes))
        for seed in (0, 1):
            list(pool.map(step, job.remotes, [seed, seed + 10]))
        list(pool.map(step_with_rows_ahead, job.remotes, [2, 12]))
        client = client_of(late)
        client.links[0].heartbeat_is_due = lambda: False  # type: ignore[method-assign]  # as if it were stopped
        before, taken = rows_of(storage), client._session.num_taken
        step(other, 13)  # its round is without the trainer that is lost
        step(other, 14)
        assert rows_of(storage) != before
        found = looked_up(late)
        assert client._session.num_taken == taken
        assert found.tolist() == rows_of(storage)
        del client.links[0].heartbeat_is_due
        expected = rows_of(storage)
        read = list(pool.map(step, job.remotes, [5, 15]))
        assert [of[0] for of in read] == [expected] * 2
        assert read[0][1] == read[1][1] == storage.values["w"].tolist()


def test_rows_that_are_being_taken_are_forgotten_too(start: Start) -> None:
    """A thread waits for rows that are on their way when the end of a round may go unnoticed."""
    job = start()
    (remote,), (storage,) = job.remotes, job.storages
    for seed in (0, 1):
        step(remote, seed)
    client, rows, begun, may_go = client_of(remote), storage.rows, threading.Event(), threading.Event()

    def slow(*args: Any, **named: Any) -> Tensor:
        found = rows(*args, **named)
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert may_go.wait(60)
        return found

    client.rows.begin_ahead()
    assert client.rows.prefetch_ahead("t", IDS)
    found = looked_up(remote)
    storage.rows = slow  # type: ignore[method-assign]
    sent = OPS.send_step([torch.ones(3, 4)], [IDS], [found], [], remote, SPEC)
    OPS.recv_step([torch.empty(3, 4)], [sent], remote, ["w"], ["w"], [0])
    assert begun.wait(60), "the lookup is on its way"
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(client._session.take_next, "t", IDS, torch.empty(3, 2))
        until(taken.running, "a thread takes them")
        client.rows.forget_ahead()
        may_go.set()
        assert not taken.result(60)


# ---------------------------------------------------------------- servers that are killed


def open_to_killable(descriptor: Descriptor) -> TrainerClient:
    client = TrainerClient(descriptor, TrainerSettings(job="j", token="t", epoch=1))
    client.connect()
    client.serve_operators()
    return client


@pytest.fixture
def launch(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[[], KillableServer]]:
    servers: list[KillableServer] = []

    def begin() -> KillableServer:
        settings = {"state_dir": str(tmp_path / "state"), "mode": "sync", "fanin": 1, "snapshot_every_s": 0.05}
        servers.append(KillableServer(nursery, tmp_path, **settings))
        return servers[-1]

    with remotes_of_a_test(open_to_killable):
        yield begin
    for server in servers:
        server.kill()


@pytest.mark.timeout(300)
def test_a_killed_server_gives_the_same_rows_from_its_log(start: Start, launch: Callable[[], KillableServer]) -> None:
    """It is killed with rows that have come, that are on their way, and twice in a row."""
    undisturbed = start()
    expected = [step(undisturbed.remotes[0], seed) for seed in range(9)]
    remotes.opener = open_to_killable
    server = launch()
    remote = str(Descriptor("sync", 0, 1, (server.endpoint,)))
    found = [step(remote, seed) for seed in (0, 1)]
    for seed in range(2, 9):
        found.append(step(remote, seed) if seed % 2 else step_with_rows_ahead(remote, seed, wait=seed != 4))
        for _ in range({2: 1, 4: 1, 6: 2}.get(seed, 0)):
            server.kill()
            server.start()
    assert found == expected
    remotes.close(remote)


# ---------------------------------------------------------------- a limit of threads


def test_without_a_thread_rows_are_not_prefetched(nursery: Nursery, tmp_path: Path) -> None:
    process = Forked(nursery, tmp_path / "limited", ["-m", "tests.ps.rows_without_threads"], {})
    assert process.end() == 0, process.errors
    assert process.output.split() == ["False", "True"]
