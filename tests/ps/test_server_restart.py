"""Servers that are killed, and started again: what was acknowledged is there, once, to the bit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.killable_server import SHAPES, TABLES, KillableServer
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Refused, Trainer
from tests.support.nursery import Nursery
from tests.support.waiting import until

from penstock.errors import PeerError, Unavailable
from penstock.ps.storage import Gradient

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0


@pytest.fixture
def launch(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., KillableServer]]:
    servers: list[KillableServer] = []

    def begin(**settings: Any) -> KillableServer:
        told = {"state_dir": str(tmp_path / "state"), "snapshot_every_s": 0.02, **settings}
        servers.append(KillableServer(nursery, tmp_path, **told))
        return servers[-1]

    yield begin
    Trainer.close_all()
    for server in servers:
        server.kill()


class Stubborn:
    """A trainer that asks again until it is answered, and joins again when it is told to."""

    def __init__(self, endpoint: str, trainer: int, *, sync: bool) -> None:
        self.endpoint, self.trainer, self.sync = endpoint, trainer, sync
        self.open: list[tuple[str, int, torch.Tensor, torch.Tensor | None]] = []
        self.calls: Trainer | None = None
        self.acknowledged = 0

    def insist(self, call: Callable[[Trainer], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if self.calls is None:
                    self.calls = Trainer(self.endpoint, self.trainer, local=self.trainer == 0)
                    self.calls.join()
                    for push in self.open:
                        self.calls.push(*push)
                return call(self.calls)
            except (Unavailable, PeerError, Refused) as error:
                gone = isinstance(error, Refused) and not error.rejoin and "has ended" not in str(error)
                if gone or time.monotonic() > deadline:
                    raise
                self.calls = None
                time.sleep(0.02)

    def step(self, number: int, gradients: dict[str, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        for block, (values, rows) in gradients.items():
            push = (block, number, values, rows)
            self.insist(partial(_push, push))
            if self.sync:
                self.open.append(push)
        if self.sync:
            assert self.insist(lambda t: t.barrier(number)) == number + 1
            self.open.clear()
        self.acknowledged = number + 1


def _push(push: tuple[str, int, torch.Tensor, torch.Tensor | None], trainer: Trainer) -> int:
    return trainer.push(*push)


def gradients(trainer: int, step: int) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    source = torch.Generator().manual_seed(1000 * trainer + step)
    dense = {name: (torch.randn(shape, generator=source), None) for name, shape in SHAPES.items()}
    ids = torch.randint(0, 40, (6,), generator=source)
    return {**dense, "t": (torch.randn(6, 2, generator=source), ids)}


def expected(num_steps: int, num_trainers: int, *, sync: bool) -> dict[str, list[float]]:
    """Return what one storage has after the same updates."""
    storage = TorchStorage(SHAPES, TABLES, sync=sync)
    for step in range(num_steps):
        storage.begin_round()
        for name in [*SHAPES, "t"]:
            pushes = [gradients(t, step)[name] for t in range(num_trainers)]
            rows = None if name != "t" else torch.cat([r for _, r in pushes if r is not None])
            values = [v for v, _ in pushes]
            total = torch.cat(values) if rows is not None else sum(values[1:], values[0].clone())
            assert isinstance(total, torch.Tensor)
            storage.update(name, Gradient(total / num_trainers if num_trainers > 1 else total, rows))
    return {k: v.tolist() for k, v in storage.everything().items()}


def stored(folder: Path, *, sync: bool) -> dict[str, list[float]]:
    """Return what a restart would find."""
    from penstock.ps.durability.wal import AppliedIndex
    from penstock.ps.persistence import recover_server

    storage = TorchStorage(SHAPES, TABLES, sync=sync)
    index = AppliedIndex(trainers=1, keeps_changes=False)
    recover_server(folder, storage, index, job="j", blocks=list(storage.blocks()))
    return {k: v.tolist() for k, v in storage.everything().items()}


@pytest.mark.parametrize(("mode", "num_trainers"), [("async", 1), ("sync", 2)])
def test_a_killed_server_loses_nothing_and_applies_nothing_twice(
    launch: Callable[..., KillableServer], tmp_path: Path, mode: str, num_trainers: int
) -> None:
    sync, chance = mode == "sync", random.Random(3)
    server = launch(mode=mode, fanin=num_trainers, lease_s=20)
    trainers = [Stubborn(server.endpoint, t, sync=sync) for t in range(num_trainers)]
    total = 200

    may_begin = [0]  # no step from this one on: each kill hits a server at work

    def train(trainer: Stubborn) -> None:
        for number in range(total):
            until(lambda number=number: number < may_begin[0])  # type: ignore[misc]
            trainer.step(number, gradients(trainer.trainer, number))

    threads = [threading.Thread(target=train, args=(t,), daemon=True) for t in trainers]
    for thread in threads:
        thread.start()
    for _ in range(3):
        reached = trainers[0].acknowledged + chance.randrange(10, 50)
        may_begin[0] = reached + 10
        until(lambda reached=reached: trainers[0].acknowledged >= reached)  # type: ignore[misc]
        time.sleep(chance.random() * 0.01)
        server.kill()
        server.start()
    may_begin[0] = total
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for trainer in trainers:
        trainer.insist(lambda t: t.leave())
    assert server.process.end() == 0
    assert stored(tmp_path / "state" / "0", sync=sync) == expected(total, num_trainers, sync=sync)
