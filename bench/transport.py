"""`bench transport`: calls with large bodies between two processes of one host.

`push` sends a body and takes a short answer, `pull` sends a short request and takes a body, `both` does the two in one
call. Contenders: `local`, shared memory passed over a Unix socket; `stream`, our gRPC, chunks of 2 MiB; `grpcio`, a
unary gRPC call with raw bytes, no protobuf, the message limit raised, which is the fastest way that grpcio has for one
message. All start from memory that is there already, and ends with the answer in memory that numpy can look at.

`copy` is one copy of the body between two buffers of this process: what moving it once costs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from bench._transport_servers import JOB, TOKEN, UNLIMITED, Servers, message
from bench.engine import alternating_blocks, timed
from bench.report import Report, quartiles
from penstock.ps.transport.local import LocalClient
from penstock.ps.transport.tcp import TcpClient

ROUNDS = 15
MIB = 1 << 20
SIZES_MIB = (1, 8, 64)
SHAPES = ("push", "pull", "both")
DEADLINE_S = 60.0
REPEATS = 3
HEAD_BYTES = 8

Call = Callable[[memoryview, int], int]
"""Sends bytes, asks for so many, returns how many came."""


def ours(client: LocalClient | TcpClient) -> Call:
    """Return the call over one of our transports."""

    def call(data: memoryview, asked: int) -> int:
        with client.call(message("push", data, asked), deadline_s=DEADLINE_S) as answer:
            return len(answer.tensors[0].data)

    return call


@functools.cache  # made once, not in the time of a call
def body(size: int, asked: int) -> bytes:
    """Return a plain request of `size` bytes that asks for so many."""
    return asked.to_bytes(HEAD_BYTES, "little") + bytes(size - HEAD_BYTES)


@contextlib.contextmanager
def calls(servers: Servers) -> Iterator[dict[str, Call]]:
    """Connect to all of them."""
    local = LocalClient(servers.local, job=JOB, token=TOKEN)
    remote = TcpClient(servers.remote, job=JOB, token=TOKEN)
    with grpc.insecure_channel(servers.plain, UNLIMITED) as channel:
        unary: Any = channel.unary_unary("/bench/Call")

        def plain(data: memoryview, asked: int) -> int:
            return len(unary(body(len(data), asked), timeout=DEADLINE_S))

        yield {"local": ours(local), "stream": ours(remote), "grpcio": plain}
    remote.close()
    local.close()


def measure(shape: str, size_mib: int, contenders: dict[str, Call], num_rounds: int, report: Report) -> None:
    """Add the milliseconds of one shape and size, and the ratios to grpcio and to our own stream."""
    size = size_mib * MIB
    sent, asked = (size if shape != "pull" else HEAD_BYTES), (size if shape != "push" else 0)
    data = memoryview(bytes(sent))
    for name, call in contenders.items():
        got = call(data, asked)
        if got != asked:
            raise RuntimeError(f"{name} answered {got} bytes, not {asked}")

    def repeated(call: Call) -> Callable[[], float]:
        return lambda: statistics.median(timed(lambda: call(data, asked)) for _ in range(REPEATS))

    source, target = memoryview(bytearray(size)), memoryview(bytearray(size))

    def copy() -> None:
        target[:] = source

    timers = {name: repeated(call) for name, call in contenders.items()}
    samples = alternating_blocks({**timers, "copy": lambda: timed(copy)}, num_rounds)
    for name, seconds in samples.items():
        report.add(f"{name}_{shape}_{size_mib}mb_ms", [1e3 * s for s in seconds], digits=3)
    for peer in ("grpcio", "stream"):
        ratios = [p / s for p, s in zip(samples[peer], samples["local"], strict=True)]
        report.add(f"{peer}_{shape}_{size_mib}mb_ratio", ratios, digits=2)
        report.ratios[f"{peer}_{shape}_{size_mib}mb"] = round(quartiles(ratios)[1], 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MIB), help="MiB a body (%(default)s)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure every shape and size."""
    report = Report("transport", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    with Servers(max(extra.sizes) * MIB) as servers, calls(servers) as contenders:
        for size_mib in extra.sizes:
            for shape in SHAPES:
                measure(shape, size_mib, contenders, rounds, report)
    return report
