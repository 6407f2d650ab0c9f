"""A server that has ended in a process that goes on: what it counted stays in the reports, its tables are let go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Trainer

from penstock import telemetry
from penstock.protocol.frames import decode
from penstock.protocol.tables import TableSums
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.telemetry.exchanges import PERIOD_S, ExchangeWatch


class Asked(TorchStorage):
    """Counts how often its tables were asked for."""

    def __init__(self) -> None:
        super().__init__({"w": (2,)})
        self.num_asked = 0

    def tables(self) -> Sequence[TableSums]:
        self.num_asked += 1
        return super().tables()


def test_a_server_that_ended_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, storage = ExchangeWatch(), Asked()
    monkeypatch.setattr(
        telemetry, "exchange", lambda counters, tables, mode, *, work: watch.add(counters, [], tables, mode)
    )
    monkeypatch.setattr(telemetry, "end_exchange", watch.remove)
    server = ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, "sync", job="j", token="t"), storage)
    server.start()
    trainer = Trainer(f"127.0.0.1:{server.port}", 0)
    trainer.join()
    trainer.push("w", 0, torch.ones(2))
    trainer.barrier(0)
    Trainer.close_all()
    server.close()
    num_asked = storage.num_asked
    item = watch.due(PERIOD_S, step=1, now_ns=1, cpu_ns=1)
    assert item is not None
    body = decode(bytes(item.frame)).body
    assert ("trainer 0" in body["peers"], "w" in body["blocks"]) == (True, True)
    assert storage.num_asked == num_asked
