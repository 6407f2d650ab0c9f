"""How many cores a server's threads use: what OpenMP itself says where the work is done."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Trainer

from penstock.native.intra_op import intra_op_threads_here
from penstock.ps import state as cores
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import Gradient


class Watched(TorchStorage):
    """Notes OpenMP's number of threads at each update and each read of rows."""

    def __init__(self) -> None:
        super().__init__({"w": (64, 64)}, {"t": (2, 10)})
        self.seen: list[tuple[str, int]] = []

    def update(self, block: str, gradient: Gradient) -> None:
        self.seen.append(("update", intra_op_threads_here()[0]))
        super().update(block, gradient)

    def rows(self, block: str, ids: torch.Tensor, *, create: bool) -> torch.Tensor:
        self.seen.append(("rows", intra_op_threads_here()[0]))
        return super().rows(block, ids, create=create)


def test_little_work_of_a_server_is_done_on_one_core() -> None:
    storage = Watched()
    server = ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, "sync", job="j", token="t"), storage)
    server.start()
    try:
        storage.seen.clear()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        trainer.lookup("w", [1, 5])
        trainer.push("w", 0, torch.ones(64, 64))
        trainer.barrier(0)
        assert storage.seen == [("rows", 1), ("update", 1)]
    finally:
        Trainer.close_all()
        server.close()


def test_large_work_has_all_cores_and_other_threads_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_ALL", 3)
    before, seen = intra_op_threads_here()[0], []

    def work() -> None:
        for num_bytes in (cores.LARGE - 1, cores.LARGE, 0):
            cores.use_cores_for(num_bytes)
            seen.append(intra_op_threads_here()[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1, 3, 1]
    assert intra_op_threads_here()[0] == before
