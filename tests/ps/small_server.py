"""A parameter server of a few lines: SGD over named tensors, real transports and round machines, no log."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.support.endpoints import free_endpoint
from torch import Tensor

from penstock.errors import PeerError
from penstock.ps.client import TrainerClient
from penstock.ps.rounds import messages
from penstock.ps.rounds.immediate import ImmediateUpdates
from penstock.ps.rounds.machine import Membership
from penstock.ps.rounds.messages import Applied, AppliedPush, Apply, Close, Refuse, Release, Reply, TrainerIncarnation
from penstock.ps.rounds.sync import SyncRounds
from penstock.ps.transport.local import LineServer, host_id, refusal
from penstock.ps.transport.tcp import TcpServer
from penstock.ps.wire import Message, WireTensor, from_wire, to_wire

Payload = tuple[Tensor | None, Tensor]


class SmallServer:
    """Serves until closed. `delay(kind)` runs before each request is handled; `local`: whether it tells its socket.

    `clock`: what leases run by.
    """

    def __init__(
        self, values: dict[str, Tensor], *, fanin: int = 1, sync: bool = True, lease_s: float = 600.0,
        local: bool = True, address: str = "", lr: float = 1.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.values, self.lr, self.sync, self.clock = values, lr, sync, clock
        self.lease_s = lease_s
        members = Membership(expected=fanin, lease_s=lease_s)
        self.machine: SyncRounds | ImmediateUpdates = SyncRounds(members) if sync else ImmediateUpdates(members)
        self.changed = threading.Condition(threading.RLock())
        self.answers: dict[int, Message] = {}
        self.payloads: dict[int, Payload] = {}
        self.num_tickets = self.num_applied = 0
        self.requests: list[str] = []
        self.lost: list[int] = []
        self.delay: Callable[[str], object] = lambda kind: None
        self._closing = threading.Event()
        self._local = LineServer(self.handle, job="local", token="") if local else None
        self.address = self._local.address if self._local else ""
        self._remote = TcpServer(self.handle, address=address or free_endpoint(), job="local", token="")
        self.port = self._remote.port
        self.endpoint = f"127.0.0.1:{self.port}"
        self._ticking = threading.Thread(target=self._tick, daemon=True)
        self._ticking.start()

    def _tick(self) -> None:
        while not self._closing.wait(0.05):
            with self.changed:
                self._carry_out(messages.Tick())

    def handle(self, message: Message) -> Message:
        if message.kind == "step":
            return self._step(message)
        self.requests.append(message.kind)
        self.delay(message.kind)
        if message.kind == "where":
            return Message("here", {"host": host_id(), "address": self.address})
        if message.kind == "agree":
            return Message("answer", {"round": 0, "staleness": 0})
        with self.changed:
            ticket = self.num_tickets = self.num_tickets + 1
            self._carry_out(self._event(message, ticket))
            answered = self.changed.wait_for(lambda: ticket in self.answers or self._closing.is_set(), 60)
            if not answered or self._closing.is_set():
                raise PeerError("the test's server did not answer")
            answer = self.answers.pop(ticket)
            return answer if answer.kind == "refuse" else self._read(message, answer)

    def _step(self, message: Message) -> Message:
        """Handle what it consists of; the requests are those."""
        fields, answer = dict(message.fields), Message("answer", {})
        blocks = str(fields.pop("blocks"))
        tensors: dict[str, list[WireTensor]] = {}
        for tensor in message.tensors:
            tensors.setdefault(tensor.name.partition(":")[2], []).append(tensor)
        for block, found in tensors.items():
            answer = self.handle(Message("push", {**fields, "block": block}, found))
            if answer.kind == "refuse":
                return answer
        answer = self.handle(Message("barrier", fields))
        if answer.kind == "refuse" or blocks == "[]":
            return answer
        return self.handle(Message("pull", {**fields, "round": answer.fields["round"], "blocks": blocks}))

    def _event(self, message: Message, ticket: int) -> messages.Event:
        fields: Any = message.fields
        sender = TrainerIncarnation(fields["trainer"], fields["epoch"])
        if message.kind == "push":
            tensors = [from_wire(t).clone() for t in message.tensors]
            self.payloads[ticket] = (tensors[0] if len(tensors) > 1 else None, tensors[-1])
            return messages.Push(ticket, sender, fields["round"], fields["block"], ticket)
        if message.kind in {"pull", "lookup"}:
            return messages.Pull(ticket, sender, fields["round"])
        if message.kind == "barrier":
            return messages.Barrier(ticket, sender, fields["round"])
        kinds: dict[str, Any] = {"join": messages.Join, "beat": messages.Heartbeat, "leave": messages.Leave}
        return kinds[message.kind](ticket, sender)  # type: ignore[no-any-return]  # one of three events

    def _carry_out(self, event: messages.Event) -> None:
        for todo in self.machine.handle(event, self.clock()):
            match todo:
                case Reply(ticket, round):
                    self.answers[ticket] = Message("answer", {"round": round, "staleness": 0})
                case Refuse(ticket, reason, rejoin):
                    self.answers[ticket] = refusal(reason, rejoin=rejoin)
                case Release(payload):
                    del self.payloads[payload]
                case Close(round, contributions, members):
                    for block, payloads in contributions.items():
                        for payload in payloads:
                            self._apply(block, self.payloads.pop(payload), len(members))
                    self._carry_out(Applied(round))
                case Apply(payload, block):
                    self._apply(block, self.payloads.pop(payload), 1)
                    self._carry_out(AppliedPush(payload))
                case messages.Lost(trainer):
                    self.lost.append(trainer)
        self.changed.notify_all()

    def _apply(self, block: str, payload: Payload, share: int) -> None:
        rows, values = payload
        self.num_applied += 1
        if rows is None:
            self.values[block] -= self.lr * values / share
        else:
            self.values[block].index_add_(0, rows, values / share, alpha=-self.lr)

    def _read(self, message: Message, answer: Message) -> Message:
        if message.kind == "pull":
            blocks = json.loads(str(message.fields["blocks"]))
            return Message("answer", answer.fields, [to_wire(b, self.values[b].clone()) for b in blocks])
        if message.kind == "lookup":
            rows = self.values[str(message.fields["table"])][from_wire(message.tensors[0])]
            return Message("answer", answer.fields, [to_wire("rows", rows)])
        return answer

    def close_socket(self) -> None:
        """Be reached by TCP only from now on."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def close(self) -> None:
        """Stop at once: calls in progress break."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self.changed:
            self.changed.notify_all()
        self.close_socket()
        self._remote.close()
        self._ticking.join()


def wait_no_longer_than(client: TrainerClient, deadline_s: float) -> None:
    """From now on: how long a server of a client may be unreachable."""
    for link in client.links:
        link._settings = replace(link._settings, deadline_s=deadline_s)
