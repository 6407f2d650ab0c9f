"""A server without rounds: async and GEO, order, staleness, many threads, what others changed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Refused, Trainer

from penstock.ps.durability.wal import recover
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import Gradient

SETTINGS = ServerSettings("127.0.0.1:0", 0, 1, "async", job="j", token="t")
SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,), "large": (200_000,)}
Start = Callable[..., tuple[ParameterServer, TorchStorage, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ParameterServer] = []

    def begin(**changes: Any) -> tuple[ParameterServer, TorchStorage, str]:
        settings = replace(SETTINGS, **changes)
        storage = TorchStorage(SHAPES, {"t": (2, 10)}, sync=False, geo=settings.mode == "geo")
        server = ParameterServer(settings, storage)
        servers.append(server)
        server.start()
        return server, storage, f"127.0.0.1:{server.port}"

    yield begin
    Trainer.close_all()
    for server in servers:
        server.close()


@pytest.mark.parametrize("local", [True, False])
def test_a_push_is_applied_when_it_is_answered(start: Start, local: bool) -> None:
    _, storage, endpoint = start()
    mirror = TorchStorage(SHAPES, {"t": (2, 10)}, sync=False)
    trainer = Trainer(endpoint, 0, local=local)
    trainer.join()
    torch.manual_seed(0)
    for step in range(1, 5):
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape)
            trainer.push(name, step, gradient)
            trainer.push(name, step, gradient)
            mirror.update(name, Gradient(gradient))
            assert torch.equal(trainer.pull(name)[name], mirror.values[name])
    assert storage.steps["large"] == 4


def test_staleness_is_told_and_counted(start: Start) -> None:
    server, _, endpoint = start(fanin=2)
    a, b = Trainer(endpoint, 0), Trainer(endpoint, 1)
    a.join(), b.join()
    a.pull("b"), b.pull("b")
    assert [a.push("b", step, torch.ones(5)) for step in (1, 2, 3)] == [0, 0, 0]
    assert b.push("b", 1, torch.ones(5)) == 3
    b.pull("b")
    assert b.push("b", 2, torch.ones(5)) == 0
    assert server.staleness == {0: 4, 3: 1}
    assert server.counters.rows()["trainer 1", "b"].staleness == 3


@pytest.mark.parametrize("matters", [False, True])
def test_reads_are_logged_only_where_updates_depend_on_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matters: bool
) -> None:
    server, storage, endpoint = start(state_dir=tmp_path)
    monkeypatch.setattr(storage, "pulled", lambda block, trainer: matters)
    trainer = Trainer(endpoint, 0)
    trainer.join()
    trainer.pull("w", "b")
    trainer.push("w", 1, torch.ones(3, 4))
    assert server.settings.folder is not None
    kinds = [record.message.kind for record in recover(server.settings.folder, since=0)]
    assert kinds == ["joined", *["pulled"] * (2 * matters), "applied"]


def test_eight_threads_update_each_block_one_by_one(start: Start) -> None:
    _, storage, endpoint = start(fanin=8)
    storage.values["w"].zero_()

    def hammer(number: int) -> None:
        trainer = Trainer(endpoint, number, local=number % 2 == 0)
        trainer.join()
        for step in range(1, 41):
            trainer.push("w", step, torch.ones(3, 4))
            trainer.push("t", step, torch.ones(1, 2), torch.tensor([number]))
            if step % 8 == 0:
                trainer.pull("w", "large")
                trainer.lookup("t", [number])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(hammer, n) for n in range(8)]:
            done.result()
    assert not storage.overlaps
    assert (storage.steps["w"], storage.steps["t"]) == (320, 320)
    alone = TorchStorage(SHAPES, sync=False)
    alone.values["w"].zero_()
    for _ in range(320):
        alone.update("w", Gradient(torch.ones(3, 4)))
    assert torch.equal(storage.values["w"], alone.values["w"])


def test_a_pull_never_sees_half_an_update(start: Start) -> None:
    _, storage, endpoint = start(fanin=2)
    storage.values["large"].zero_()
    writer, reader = Trainer(endpoint, 0), Trainer(endpoint, 1)
    writer.join(), reader.join()
    enough = threading.Event()

    def write() -> None:
        for step in itertools.count(1):
            if enough.is_set():
                return
            writer.push("large", step, torch.ones(200_000))

    seen = set[float]()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            while len(seen) < 30 and not writing.done():  # it reads while the other writes
                values = reader.pull("large")["large"]
                assert float(values.min()) == float(values.max())
                seen.add(float(values[0]))
        finally:
            enough.set()
    writing.result()


def test_a_queued_push_is_applied_without_a_copy(start: Start) -> None:
    server, storage, endpoint = start(fanin=2)
    a, b = Trainer(endpoint, 0), Trainer(endpoint, 1)
    a.join(), b.join()
    inside, go = threading.Event(), threading.Event()

    def before(block: str) -> None:
        inside.set()
        go.wait(60)

    storage.before = before
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(a.push, "large", 1, torch.ones(200_000))
        assert inside.wait(60)
        second = pool.submit(b.push, "large", 1, torch.full((200_000,), 3.0))
        while len(server._state.payloads) < 2:
            pass
        assert server._state.payloads.pool.num_made == 0, "nothing is copied"
        go.set()
        first.result()
        second.result()
    alone = TorchStorage(SHAPES, sync=False)
    alone.update("large", Gradient(torch.ones(200_000)))
    alone.update("large", Gradient(torch.full((200_000,), 3.0)))
    assert torch.equal(storage.values["large"], alone.values["large"])


def test_a_full_table_refuses_the_push_and_serves_on(start: Start) -> None:
    _, storage, endpoint = start()
    trainer = Trainer(endpoint, 0)
    trainer.join()
    trainer.lookup("t", list(range(10)))
    with pytest.raises(Refused, match="table 't' is full"):
        trainer.push("t", 1, torch.ones(1, 2), torch.tensor([11]))
    with pytest.raises(Refused, match="table 't' is full"):
        trainer.lookup("t", [12])
    trainer.push("t", 2, torch.ones(1, 2), torch.tensor([3]))
    assert storage.steps["t"] == 1


def test_a_trainer_may_leave_and_come_back_under_its_epoch(start: Start) -> None:
    server, storage, endpoint = start(fanin=2)
    stays, trainer = Trainer(endpoint, 1), Trainer(endpoint, 0)
    stays.join(), trainer.join()
    trainer.push("b", 1, torch.ones(5))
    trainer.ask("leave")
    trainer.join()
    trainer.push("b", 1, torch.ones(5))
    assert storage.steps["b"] == 2
    trainer.leave()
    stays.leave()
    assert server.wait(60)


# -- GEO -------------------------------------------------------------------------------------------


def test_geo_tells_what_others_changed_since_the_last_call(start: Start) -> None:
    _, storage, endpoint = start(mode="geo", fanin=2)
    a, b = Trainer(endpoint, 0), Trainer(endpoint, 1)
    a.join(), b.join()
    a.push("w", 1, torch.ones(3, 4), torch.tensor([2, 0, 2]))
    assert a.changed("w")[0] == []
    rows, values = b.changed("w")
    assert rows == [0, 2]
    assert torch.equal(values, storage.values["w"][[0, 2]])
    assert b.changed("w")[0] == [0, 2], "until it pushes, the answer may have been lost"
    b.push("w", 1, torch.ones(1, 4), torch.tensor([1]))
    assert b.changed("w")[0] == []
    assert a.changed("w")[0] == [1]
    a.push("w", 2, torch.ones(1, 4), torch.tensor([1]))
    assert b.changed("w")[0] == [1]


def test_geo_tells_nothing_of_what_a_trainer_has_read_whole(start: Start) -> None:
    _, _, endpoint = start(mode="geo", fanin=2)
    a, b = Trainer(endpoint, 0), Trainer(endpoint, 1)
    a.join(), b.join()
    a.push("w", 1, torch.ones(1, 4), torch.tensor([2]))
    b.pull("w")
    assert b.changed("w")[0] == []


def test_geo_tables_take_any_id(start: Start) -> None:
    _, _, endpoint = start(mode="geo", fanin=2)
    a, b = Trainer(endpoint, 0), Trainer(endpoint, 1)
    a.join(), b.join()
    ids = [-(2**63), 2**63 - 1]
    a.push("t", 1, torch.ones(2, 2), torch.tensor(ids))
    rows, values = b.changed("t")
    assert rows == ids
    assert torch.equal(values, a.lookup("t", ids))
