"""A job over channels in one process: two servers, trainers that reach them by operators, and raw connections."""

from __future__ import annotations

import itertools
import json
import math
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.ps.torch_storage import TorchStorage
from tests.support.remotes import remotes_of_a_test
from torch import Tensor

from penstock.ps import remote_ops
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import communicate, remotes
from penstock.ps.remote import Descriptor, PsMode, Remote, SendCall
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings, TrainerSettings
from penstock.ps.transport.frames import Line
from penstock.ps.transport.local import channel_of
from penstock.ps.wire import Message

OPS = torch.ops.penstock
assert {"prefetch", "send_ahead", "send_step", "recv_step"} <= remote_ops.REMOTE_NAMES, "registered by its import"
HEIGHTS = [4, 5]
NUMBERS = itertools.count()


def storages(mode: str) -> list[TorchStorage]:
    sync = mode == "sync"
    return [
        TorchStorage({f"w.block{i}": (w, 4), f"t.block{i}": (t, 2)}, {"ids": (2, 1000)}, sync=sync)
        for i, (w, t) in enumerate([(3, 4), (2, 5)])
    ]


class Job:
    """Two servers in this process, and one trainer that reaches them by operators. `by_python`: without channels."""

    def __init__(
        self, mode: PsMode, *, trainers: int = 1, by_python: bool = False, stored: list[TorchStorage] | None = None,
        state_dir: Path | None = None, lease_s: float = 20.0, **settings: Any,
    ) -> None:  # fmt: skip
        self.storages = storages(mode) if stored is None else stored
        self.servers = [
            ParameterServer(
                ServerSettings(
                    "127.0.0.1:0", i, trainers, mode, state_dir=state_dir, lease_s=lease_s, tls=settings.get("tls")
                ),
                storage,
            )
            for i, storage in enumerate(self.storages)
        ]
        for server in self.servers:
            server.start()
        self.endpoints = tuple(f"127.0.0.1:{server.port}" for server in self.servers)
        self.by_python, self.settings = by_python, {**settings, "lease_s": lease_s}
        self.clients: list[TrainerClient] = []
        self.steps = [0, 0]  # by Python, in all
        self.after_ahead: Callable[[], object] = lambda: None
        dense = [f"w of job {next(NUMBERS)}", ["w.block0", "w.block1"], [0, 1], 2]  # a layout that nobody knows yet
        sparse = [["t", ["t.block0", "t.block1"], [0, 1], HEIGHTS], ["ids", ["ids"], [0, 1], []]]
        self.spec = json.dumps({"dense": [dense], "sparse": sparse})
        remotes.opener = self.open
        self.remotes = [str(Descriptor(mode, trainer, trainers, self.endpoints)) for trainer in range(trainers)]

    def open(self, descriptor: Descriptor) -> Remote:
        client = TrainerClient(descriptor, TrainerSettings(epoch=1, **self.settings))
        client.connect()
        self.clients.append(client)
        if self.by_python:
            client.serve_operators = lambda num_threads=1: None  # type: ignore[method-assign]
        elif descriptor.mode != "half_async":  # whose communicator does it
            client.serve_operators()
        send_step = client.send_step

        def counted(pushes: Sequence[SendCall]) -> None:
            self.steps[0] += 1
            send_step(pushes)

        client.send_step = counted  # type: ignore[method-assign]
        return communicate(client) if descriptor.mode == "half_async" else client

    def step(self, seed: int, trainer: int = 0) -> list[Tensor]:
        """Read, push something that depends on it, and read again; return all that was read."""
        self.steps[1] += 1
        remote, random = self.remotes[trainer], torch.Generator().manual_seed(seed)
        rows, ids = torch.randint(0, 9, (6,), generator=random), torch.randint(-5, 40, (7,), generator=random)
        of_table = (["t.block0", "t.block1"], [0, 1], HEIGHTS, 2, torch.float32, None)
        found = OPS.prefetch(rows, remote, "t", *of_table)
        spread = OPS.prefetch(ids.reshape(7, 1), remote, "ids", ["ids"], [0, 1], [], 2, torch.float32, None)
        dense = [torch.randn(3, 4, generator=random), torch.randn(2, 4, generator=random)]
        values = [found * 2 - 0.5, spread[:, 0] + 1]
        self.ahead = [OPS.send_ahead(dense[at : at + 1], remote, [f"w.block{at}"], [at]) for at in (1, 0)]
        self.after_ahead()
        sent = OPS.send_step(dense, [rows, ids], values, self.ahead, remote, self.spec)
        out = [torch.empty(3, 4), torch.empty(2, 4)]
        OPS.recv_step(out, [sent], remote, ["w", "w"], ["w.block0", "w.block1"], [0, 1])
        return [found, spread, *out]

    def everything(self) -> list[dict[str, Any]]:
        return [
            {
                **{name: (storage.values[name].tolist(), storage.speed[name].tolist()) for name in storage.values},
                "ids": sorted((id, row.tolist()) for id, row in storage.rows_of["ids"].items()),
                "steps": [storage.rounds, storage.steps],
            }
            for storage in self.storages
        ]

    def close(self) -> None:
        for remote in self.remotes:
            remotes.close(remote)
        for server in self.servers:
            server.close()


Start = Callable[..., Job]


@contextmanager
def jobs() -> Iterator[Start]:
    """Begin jobs, which are closed at the end."""
    begun: list[Job] = []

    def begin(*args: Any, **settings: Any) -> Job:
        begun.append(Job(*args, **settings))
        return begun[-1]

    with remotes_of_a_test():
        yield begin
        for job in begun:
            job.close()


def trained(job: Job, num_steps: int = 5) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    seen = [[t.tolist() for t in job.step(seed)] for seed in range(num_steps)]
    return seen, job.everything()


def dense_step(job: Job, values: list[float]) -> list[float]:
    """Push a gradient of one dense block of 3 rows of 4, the same in each row, and read the first row."""
    return dense_step_of(job.remotes[0], values)


def dense_step_of(remote: str, values: list[float]) -> list[float]:
    """`dense_step`, of the job with this remote."""
    spec = f'{{"dense": [["w", ["w.block0"], [0], 1]], "sparse": [], "of": "{remote}"}}'
    gradient = torch.tensor(values).expand(3, 4).contiguous()
    sent = OPS.send_step([gradient], [], [], [], remote, spec)
    out = torch.empty(3, 4)
    OPS.recv_step([out], [sent], remote, ["w"], ["w.block0"], [0])
    found: list[float] = out[0].tolist()
    return found


def pushed(job: Job, seed: int, *, in_pieces: bool) -> None:
    """Push rows of one server, and of both: whole, or as columns of matrices."""
    random = torch.Generator().manual_seed(seed)
    rows, ids = torch.randint(0, 4, (6,), generator=random), torch.randint(-5, 40, (5, 1), generator=random)
    wide, values = torch.randn(6, 5, generator=random), torch.randn(5, 2, generator=random)
    spec: dict[str, Any] = {"dense": [], "sparse": [["t", ["t.block0"], [0], [4]], ["ids", ["ids"], [0, 1], []]]}
    if in_pieces:
        spec["pieces"] = [[2, [[0, 0, 3], [1, 1, 3]]], [2, [[2, 2, 0]]]]
        tensors = [rows[:2].reshape(2, 1), rows[2:], ids], [wide[:2], wide[2:], values]
    else:
        tensors = [rows, ids.reshape(5)], [wide[:, 3:], values]
    sent = OPS.send_step([], *tensors, [], job.remotes[0], json.dumps(spec))
    OPS.recv_step([torch.empty(3, 4)], [sent], job.remotes[0], ["w"], ["w.block0"], [0])


def raw_channel(job: Job) -> socket.socket:
    """Return a connection that is a channel."""
    address = job.servers[0]._transports[0].address  # type: ignore[union-attr]  # of the Unix socket
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address)
    opening = Message("channel", {"job": "local", "trainer": 0, "epoch": 1})
    descriptor, _ = channel_of(Line(connection), Message("hello", {"job": "local", "token": ""}), opening, 1e12)
    assert isinstance(descriptor, int), "no TLS here"
    return socket.socket(fileno=descriptor)


AHEAD, STEP = 2, 3


def frame(
    kind: int,
    parts: Sequence[tuple[int, int, Sequence[int]]] = (),
    *,
    number: int = 0,
    trainer: int = 0,
    reads: Sequence[int] = (),
) -> bytes:
    """A message of float32 zeros (of int64, where the role is 1): parts are (block, role, sizes)."""
    head, body = b"", b""
    for block, role, sizes in parts:
        body += bytes(-len(body) % 64)
        head += struct.pack(f"<QIBbBB{len(sizes)}q", len(body), block, role, 4 if role else 6, len(sizes), 0, *sizes)
        body += bytes((8 if role else 4) * math.prod(sizes))
    head = struct.pack("<HHHHqqqqQ", kind, len(parts), len(reads), 0, trainer, 1, 1, number, len(body)) + head
    head += struct.pack(f"<{len(reads)}I", *reads)
    return struct.pack("<4sIIIQ", b"PSC2", 0, len(head), 0, len(body)) + head + body
