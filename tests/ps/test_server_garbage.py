"""Hundreds of malformed messages on each transport: nothing changes, and the server still serves."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Trainer, connect

from penstock.errors import PenstockError
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.ps.wire import KINDS, MAGIC, Message, encode, to_wire

many = pytest.mark.parametrize(
    "num_messages", [300, pytest.param(10_000, marks=pytest.mark.soak)]
)  # 300: some of each kind of damage to each kind of message
SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,)}


@pytest.fixture(params=["sync", "async"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ParameterServer, TorchStorage]]:
    storage = TorchStorage(SHAPES, {"t": (2, 10)}, sync=request.param == "sync")
    server = ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, request.param, job="j", token="t"), storage)
    server.start()
    yield server, storage
    Trainer.close_all()
    server.close()


def nonsense(chance: random.Random) -> bytes:
    return bytes(chance.randrange(256) for _ in range(chance.randrange(40)))


def wrong_fields(chance: random.Random, kind: str) -> dict[str, Any]:
    """Return fields of the right types, the sender of which is a stranger, or whose values make no sense."""
    text = ["", "w", "zz", "j", "[", '["zz"]', "t", "../..", "/etc/x\0"]
    numbers = [-1, 2, 2**62, -(2**63), 7]
    made: dict[type, Any] = {int: chance.choice(numbers), str: chance.choice(text), bool: True}
    return {name: made[wanted] for name, wanted in KINDS[kind].items()}


def malformed(chance: random.Random) -> tuple[bytes, list[bytes]]:
    """Return head and body parts that no server carries out."""
    how = chance.randrange(4)
    if how == 0:
        return nonsense(chance), [nonsense(chance)]
    kind = chance.choice(sorted(set(KINDS) - {"where", "port"}))
    tensor = to_wire(chance.choice(["values", "rows", "x"]), torch.ones(chance.randrange(5)))
    head, parts = encode(Message(kind, wrong_fields(chance, kind), [tensor] * chance.randrange(3)))
    body = [bytes(p) for p in parts]
    if how == 1:
        return head, body
    if how == 2:
        text = json.loads(head[8:])
        text[chance.choice(sorted(text))] = chance.choice([None, 5, [], {"a": 1}, "x"])
        wrong = json.dumps(text).encode()
        return struct.pack("<4sI", MAGIC, len(wrong)) + wrong, body
    torn = bytearray(head)
    torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(8)
    return bytes(torn), body


@many
def test_garbage_by_grpc(served: tuple[ParameterServer, TorchStorage], num_messages: int) -> None:
    server, storage = served
    before, chance = storage.everything(), random.Random(1)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    call: Any = channel.stream_stream("/penstock.ps.Parameters/Call")
    metadata = (("authorization", "Bearer t"), ("penstock-job", "j"))
    for _ in range(num_messages):
        head, body = malformed(chance)
        try:
            answer = list(call(iter([head, *body]), timeout=60, metadata=metadata))
        except grpc.RpcError as error:
            raise AssertionError(f"the call broke: {error}") from error
        assert b'"kind": "refuse"' in answer[0], answer[0]
    channel.close()
    check(server, storage, before)


@many
def test_garbage_by_the_socket(served: tuple[ParameterServer, TorchStorage], num_messages: int) -> None:
    server, storage = served
    before, chance = storage.everything(), random.Random(2)
    local = connect(f"127.0.0.1:{server.port}", local=True)
    address = "\0" + local._address  # type: ignore[union-attr]  # a LocalClient
    local.close()
    hello, _ = encode(Message("hello", {"job": "j", "token": "t"}))
    opened = struct.pack("<4sIIQ", b"PSL1", 0, len(hello), 0) + hello
    for _ in range(num_messages):
        head, body = malformed(chance)
        length = sum(map(len, body)) if chance.random() < 0.9 else chance.randrange(1 << 40)
        frame = struct.pack("<4sIIQ", b"PSL1", 0, len(head), length) + head + b"".join(body)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60)
            connection.connect(address)
            answers = b""
            with contextlib.suppress(ConnectionError):  # the server hangs up on what is no frame
                connection.sendall(opened)
                answers = connection.recv(1 << 16)
                connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    answers += piece
        assert answers.count(b'"kind": "answer"') == 1, "the greeting, and nothing else"
    check(server, storage, before)


def check(server: ParameterServer, storage: TorchStorage, before: dict[str, torch.Tensor]) -> None:
    """See that nothing has changed, and that the server serves."""
    after = storage.everything()
    assert {k: v.tolist() for k, v in after.items()} == {k: v.tolist() for k, v in before.items()}
    assert not len(server._state.payloads)
    for local in (True, False):
        trainer = Trainer(f"127.0.0.1:{server.port}", 0, local=local)
        trainer.join()
        assert torch.equal(trainer.pull("w")["w"], storage.values["w"])


def test_a_stranger_is_not_heard(served: tuple[ParameterServer, TorchStorage]) -> None:
    server, _ = served
    client = connect(f"127.0.0.1:{server.port}", local=False)
    client._metadata = (("authorization", "Bearer x"), ("penstock-job", "j"))  # type: ignore[union-attr]  # a TcpClient
    with pytest.raises(PenstockError, match="the job or its token is wrong"):
        client.call(Message("where", {}), deadline_s=60)
    client.close()
