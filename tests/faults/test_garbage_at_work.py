"""2000 malformed messages to the server of a job at work: it comes to what a job that nobody disturbs comes to."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tests.faults.fluid_jobs import Job, Left, Undisturbed
from tests.ps.test_server_garbage import malformed
from tests.ps.trainer_calls import connect

from penstock.ps.transport.local import LocalClient
from penstock.ps.wire import Message, encode

NUMBER = 1000  # on each transport
METADATA = (("authorization", "Bearer t"), ("penstock-job", "j"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def throw_by_grpc(endpoint: str, chance: random.Random) -> int:
    """Return how many were refused."""
    with grpc.insecure_channel(endpoint) as channel:
        call: Any = channel.stream_stream("/penstock.ps.Parameters/Call")
        refused = 0
        for _ in range(NUMBER):
            head, body = malformed(chance)
            answer = list(call(iter([head, *body]), timeout=30, metadata=METADATA))
            refused += b'"kind": "refuse"' in answer[0]
    return refused


def throw_by_socket(address: str, chance: random.Random) -> int:
    """Return how many were not answered, or refused."""
    hello, _ = encode(Message("hello", {"job": "j", "token": "t"}))
    opened = struct.pack("<4sIIQ", b"PSL1", 0, len(hello), 0) + hello
    refused = 0
    for _ in range(NUMBER):
        head, body = malformed(chance)
        length = sum(map(len, body)) if chance.random() < 0.9 else chance.randrange(1 << 40)
        frame = struct.pack("<4sIIQ", b"PSL1", 0, len(head), length) + head + b"".join(body)
        answers = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(30)
            connection.connect("\0" + address)
            with contextlib.suppress(ConnectionError):  # the server hangs up on what is no frame
                connection.sendall(opened)
                answers = connection.recv(1 << 16)
                connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    answers += piece
        refused += answers.count(b'"kind": "answer"') == 1  # the greeting, and nothing else
    return refused


def test_garbage_does_not_disturb_a_job(job: Callable[..., Job], undisturbed: Undisturbed) -> None:
    one = job(PENSTOCK_PS_SNAPSHOT_S="2")
    server, stop = one.server(), one.folder / "stop"
    trainers = [one.trainer(t, "--until", stop) for t in (0, 1)]
    trainers[0].reaches(5)
    assert throw_by_grpc(one.endpoints[0], random.Random(1)) == NUMBER
    local = connect(one.endpoints[0], local=True)
    assert isinstance(local, LocalClient)
    assert throw_by_socket(local._address, random.Random(2)) == NUMBER
    local.close()
    trainers[0].reaches(max(len(trainers[0].losses) + 1, undisturbed.steps))
    assert not server.has_ended(0)
    stop.touch()
    one.all_end_well()
    left = Left(one)
    for number, trainer in enumerate(trainers):
        assert {k: v for k, v in trainer.losses.items() if k < undisturbed.steps} == undisturbed.losses[number]
        applied = left.applied(number)
        assert list(applied) == list(trainer.losses)
        # Whoever sees the end a step later is alone in it.
        assert set(list(applied.values())[:-1]) == {1.0}
