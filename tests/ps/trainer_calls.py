"""A trainer of a few lines: one call after another, by either transport."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.ps.transport.local import LocalClient
from penstock.ps.transport.tcp import TcpClient
from penstock.ps.wire import Message, from_wire, to_wire


class Refused(Exception):
    """The server refuses."""

    def __init__(self, reason: str, rejoin: bool) -> None:
        super().__init__(reason)
        self.rejoin = rejoin


def connect(endpoint: str, *, local: bool) -> LocalClient | TcpClient:
    """Return a client of a server's port, or of the socket that it tells there."""
    remote = TcpClient(endpoint, job="j", token="t")
    if not local:
        return remote
    with remote.call(Message("where", {}), deadline_s=60) as here:
        address = str(here.fields["address"])
    remote.close()
    return LocalClient(address, job="j", token="t")


class Trainer:
    """Calls of one trainer. Raises Refused."""

    opened: ClassVar[list[Trainer]] = []

    def __init__(self, endpoint: str, trainer: int, *, local: bool = True, epoch: int = 0) -> None:
        self.client = connect(endpoint, local=local)
        Trainer.opened.append(self)
        self.sender: dict[str, Any] = {"job": "j", "trainer": trainer, "epoch": epoch}

    def ask(self, kind: str, *tensors: tuple[str, Tensor], deadline_s: float = 60, **fields: Any) -> Any:
        """Return (fields, copies of the tensors) of the answer."""
        views = [to_wire(name, tensor) for name, tensor in tensors]
        message = Message(kind, {**self.sender, **fields}, views)
        with self.client.call(message, deadline_s=deadline_s) as answer:
            if answer.kind == "refuse":
                raise Refused(str(answer.fields["reason"]), bool(answer.fields["rejoin"]))
            return answer.fields, {t.name: from_wire(t).clone() for t in answer.tensors}

    def join(self) -> int:
        return int(self.ask("join")[0]["round"])

    def push(self, block: str, round: int, values: Tensor, rows: Tensor | None = None) -> int:
        """Return the staleness."""
        named = [("values", values)] if rows is None else [("rows", rows), ("values", values)]
        return int(self.ask("push", *named, round=round, block=block)[0]["staleness"])

    def barrier(self, round: int, **more: Any) -> int:
        return int(self.ask("barrier", round=round, **more)[0]["round"])

    def step(self, round: int, *blocks: str, **pushed: Tensor) -> Any:
        """Push by names such as `values_w`; return (fields, what was read)."""
        tensors = [(name.replace("_", ":", 1), tensor) for name, tensor in pushed.items()]
        return self.ask("step", *tensors, round=round, blocks=json.dumps(blocks))

    def pull(self, *blocks: str, round: int = 0) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.ask("pull", round=round, blocks=json.dumps(blocks))[1]
        return found

    def lookup(self, table: str, ids: list[int], round: int = 0) -> Tensor:
        found: Tensor = self.ask("lookup", ("ids", torch.tensor(ids, dtype=torch.int64)), round=round, table=table)[1][
            "rows"
        ]
        return found

    def changed(self, block: str) -> tuple[list[int], Tensor]:
        tensors = self.ask("changed", block=block)[1]
        return tensors["rows"].tolist(), tensors["values"]

    def leave(self) -> None:
        self.ask("leave")
        self.client.close()

    @classmethod
    def close_all(cls) -> None:
        """Close the connections of all trainers of a test."""
        for trainer in cls.opened:
            trainer.client.close()
        cls.opened.clear()
