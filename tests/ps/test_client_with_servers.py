"""Trainers' clients and real parameter servers: training equals one process, whatever is killed in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.ps.server_process import SHAPES
from tests.ps.torch_storage import TorchStorage
from tests.support.capabilities import absent
from tests.support.endpoints import free_endpoint
from tests.support.nursery import Forked, Nursery
from torch import Tensor

from penstock.errors import PeerError
from penstock.ps.client import TrainerClient
from penstock.ps.remote import Descriptor, PsMode
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings, TrainerSettings
from penstock.ps.storage import Gradient

STEPS = 12


def client_of(endpoints: list[str], trainer: int = 0, of: int = 1, mode: PsMode = "sync") -> TrainerClient:
    """Return a connected client."""
    client = TrainerClient(Descriptor(mode, trainer, of, tuple(endpoints)), TrainerSettings(epoch=1))
    client.connect()
    return client


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers, and what they keep."""

    storages: list[TorchStorage]
    endpoints: list[str]
    servers: list[ParameterServer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two servers: a parameter of 5 rows and a table of 9, cut after row 3 and 4; a table spread by id."""
    storages = [
        TorchStorage({f"w.block{i}": (w, 4), f"t.block{i}": (t, 2)}, {"ids": (2, 100)}, dtype=torch.float64)
        for i, (w, t) in enumerate([(3, 4), (2, 5)])
    ]
    servers = [
        ParameterServer(ServerSettings("127.0.0.1:0", i, 2, "sync"), storage) for i, storage in enumerate(storages)
    ]
    for server in servers:
        server.start()
    yield Pair(storages, [f"127.0.0.1:{server.port}" for server in servers], servers)
    for server in servers:
        server.close()


def train_two_steps_of_rows(client: TrainerClient, trainer: int) -> list[float]:
    """Train; the gradients depend on what is read, so that an error in one step is one in all that follow."""
    generator = torch.Generator().manual_seed(trainer)
    seen = []
    w, blocks, heights = torch.empty(5, 4, dtype=torch.float64), ["t.block0", "t.block1"], [4, 5]
    for _ in range(STEPS):
        client.recv("w", ["w.block0", "w.block1"], [0, 1], [w[:3], w[3:]])
        rows = torch.randint(0, 9, (6,), generator=generator)
        looked = torch.empty(6, 2, dtype=torch.float64)
        client.prefetch("t", blocks, [0, 1], heights, rows, looked)
        gradient = w * (trainer + 1) - 0.5
        client.send("w", ["w.block0", "w.block1"], [0, 1], [gradient[:3], gradient[3:]])
        client.send_rows("t", blocks, [0, 1], heights, rows, looked * 2 + trainer)
        client.send_barrier()
        client.fetch_barrier()
        seen.append(float(w.sum() + looked.sum()))
    return seen


def in_one_process(starts: list[TorchStorage]) -> tuple[list[list[float]], Tensor, Tensor]:
    """The same training on whole parameters; returns (what each trainer saw, the parameter, the table)."""
    local = TorchStorage({"w": (5, 4), "t": (9, 2)}, dtype=torch.float64)
    local.values["w"] = torch.cat([s.values[f"w.block{i}"] for i, s in enumerate(starts)])
    local.values["t"] = torch.cat([s.values[f"t.block{i}"] for i, s in enumerate(starts)])
    generators = [torch.Generator().manual_seed(t) for t in range(2)]
    seen: list[list[float]] = [[], []]
    for _ in range(STEPS):
        w, t = local.values["w"], local.values["t"]
        rows = [torch.randint(0, 9, (6,), generator=g) for g in generators]
        for trainer in range(2):
            seen[trainer].append(float(w.sum() + t[rows[trainer]].sum()))
        gradient = sum(((w * (trainer + 1) - 0.5) for trainer in range(2)), torch.zeros(())) / 2
        sparse = torch.cat([(t[rows[trainer]] * 2 + trainer) / 2 for trainer in range(2)])
        local.begin_round()
        local.update("w", Gradient(gradient))
        local.update("t", Gradient(sparse, torch.cat(rows)))
    return seen, local.values["w"], local.values["t"]


def test_two_trainers_at_two_servers_equal_one_process(pair: Pair) -> None:
    storages, endpoints = pair.storages, pair.endpoints
    expected, w, t = in_one_process(storages)
    with ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda trainer: client_of(endpoints, trainer, 2), range(2)))
        seen = list(pool.map(train_two_steps_of_rows, clients, range(2)))
        assert all(link.route.is_local for client in clients for link in client.links)
        list(pool.map(TrainerClient.close, clients))
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-12, atol=1e-12)
    for name, whole in (("w", w), ("t", t)):
        trained = torch.cat([s.values[f"{name}.block{i}"] for i, s in enumerate(storages)])
        torch.testing.assert_close(trained, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("missing", [(), ("memfd",), ("memfd", "shared_memory")], ids=str)
def test_large_values_travel_whatever_memory_the_host_has(missing: tuple[str, ...]) -> None:
    storage = TorchStorage({"w": (3000, 4)}, dtype=torch.float64)
    before, read = storage.values["w"].clone(), torch.empty(3000, 4, dtype=torch.float64)
    gradient = torch.randn(3000, 4, dtype=torch.float64)
    with absent(*missing), ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, "sync"), storage) as server:
        server.start()
        client = client_of([f"127.0.0.1:{server.port}"])
        client.send("w", ["w"], [0], [gradient])
        client.send_barrier()
        client.recv("w", ["w"], [0], [read])
        client.close()
    assert torch.equal(read, storage.values["w"])
    assert not torch.equal(read, before)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("num_ids", [1, 2])
def test_few_ids_of_narrow_tables_are_looked_up(width: int, num_ids: int) -> None:
    storage = TorchStorage({"t": (9, width)})
    ids = torch.tensor([3, 7])[:num_ids]
    with ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, "sync"), storage) as server:
        server.start()
        client = client_of([f"127.0.0.1:{server.port}"])
        for _ in range(3):  # the first lookup goes by another way than those after it
            out = torch.full((num_ids, width), -1.0)
            client.prefetch("t", ["t"], [0], [9], ids, out)
            assert torch.equal(out, storage.values["t"][ids])
        client.close()


def test_servers_end_when_all_trainers_have_closed(pair: Pair) -> None:
    with ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda trainer: client_of(pair.endpoints, trainer, 2), range(2)))
        clients[0].close()
        assert not pair.servers[0].wait(0)
        clients[1].close()
    assert all(server.wait(60) for server in pair.servers)


def test_ids_of_a_spread_table_live_on_one_server_each(pair: Pair) -> None:
    storages, endpoints = pair.storages, pair.endpoints
    ids = torch.tensor([-(2**63), 5, 2**63 - 1, 5, 17, 0])
    out = torch.empty(6, 2)
    with ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda trainer: client_of(endpoints, trainer, 2), range(2)))
        clients[0].send_rows("ids", ["ids"], [0, 1], [], ids, torch.ones(6, 2))
        list(pool.map(TrainerClient.send_barrier, clients))
        clients[1].prefetch("ids", ["ids"], [0, 1], [], ids, out)
        list(pool.map(TrainerClient.close, clients))
    held = [set(s.rows_of["ids"]) for s in storages]
    assert held[0].isdisjoint(held[1])
    assert held[0] | held[1] == set(ids.tolist())
    # Momentum-free rows: first value id % 7, less rate 0.1 / 2 times half of what one of two trainers sent.
    sums = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    first = torch.tensor([float(i % 7) for i in ids.tolist()])
    torch.testing.assert_close(out, (first - 0.05 * sums / 2)[:, None].expand(6, 2))


class Process:
    """A server in a process of its own, started, killed and started again at one endpoint."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder, self.endpoint = nursery, folder, free_endpoint()
        self._starts = itertools.count()
        self.start()

    def start(self) -> None:
        argv = ["-m", "tests.ps.server_process", self.endpoint, str(self._folder / "state"), "1"]
        self.process = Forked(self._nursery, self._folder / f"server{next(self._starts)}", argv, {})
        self.endpoint = self.process.first_line()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """It ends by itself when all have left."""
        assert self.process.end() == 0, self.process.errors


@pytest.fixture
def process(nursery: Nursery, tmp_path: Path) -> Iterator[Process]:
    process = Process(nursery, tmp_path)
    yield process
    process.process.close()


def test_a_server_killed_during_a_round_recovers_without_loss(process: Process) -> None:
    local = TorchStorage(SHAPES, dtype=torch.float64)
    client = client_of([process.endpoint])
    a, b = torch.empty(40, 30, dtype=torch.float64), torch.empty(7, dtype=torch.float64)

    def push(name: str, value: Tensor) -> None:
        client.send(name, [name], [0], [value])

    def restart() -> None:
        process.kill()
        process.start()

    def nothing() -> None:
        pass

    whens: list[Callable[[], None]] = [nothing, restart, nothing]
    # It is killed before the pushes, between them, before the barrier, and after it.
    for at in range(4):
        for when in whens:
            client.recv("a", ["a"], [0], [a])
            client.recv("b", ["b"], [0], [b])
            calls: list[Callable[[], None]] = [
                partial(push, "a", a * 2),
                partial(push, "b", b - 1),
                client.send_barrier,
            ]
            calls.insert(at, when)
            for call in calls:
                call()
            local.begin_round()
            local.update("a", Gradient(local.values["a"] * 2))
            local.update("b", Gradient(local.values["b"] - 1))
    client.recv("a", ["a"], [0], [a])
    client.recv("b", ["b"], [0], [b])
    assert torch.equal(a, local.values["a"])
    assert torch.equal(b, local.values["b"])
    client.close()
    process.end()


@pytest.mark.parametrize(("mode", "of"), [("async", 2), ("sync", 3)])
def test_a_trainer_of_another_mode_or_number_is_not_admitted(mode: PsMode, of: int) -> None:
    storage = TorchStorage(SHAPES, dtype=torch.float64)
    with ParameterServer(ServerSettings("127.0.0.1:0", 0, 2, "sync", start_s=60.0), storage) as server:
        server.start()
        client = TrainerClient(
            Descriptor(mode, 0, of, (f"127.0.0.1:{server.port}",)), TrainerSettings(epoch=1, start_s=20.0)
        )
        with pytest.raises(PeerError, match=rf"of {of} trainers in mode {mode}; .* of 2 in mode sync\. .*sync_mode"):
            client.connect()
        client.close()
        assert server._dispatcher.machine.members.missing() == [0, 1]
