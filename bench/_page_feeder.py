"""A trainer of a large graph, as the server sees one: sums of 100,000 operator runs a second, and whole steps."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from bench._large_graph import large_graph
from penstock.protocol.frames import FLAG_WHOLE_STEP, Array, Column, Frame, Kind, encode
from penstock.protocol.graphdoc import graph_hash

PERIOD_S = 0.1
RUNS_PER_S = 100_000
STEP_EVERY = 10


def main() -> None:
    """Attach, print the job's id, and send until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--operators", type=int, required=True)
    parser.add_argument("--slices", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    token = sys.stdin.readline().strip()
    document = large_graph(options.operators)
    with connect(
        options.url.replace("http", "ws", 1) + "/api/v1/attach",
        additional_headers={"Authorization": f"Bearer {token}"},
        compression=None,
    ) as link:
        host = socket.gethostname()
        link.send(json.dumps({"type": "register", "job_name": "large", "role": "trainer", "index": 0, "host": host,
                              "pid": os.getpid()}))  # fmt: skip
        registered = json.loads(link.recv())
        numbers = iter(range(2**62))

        def send(
            kind: Kind, columns: Mapping[Column, Array] | None = None, body: Any = None, ago_ns: int = 0, **more: int
        ) -> None:
            t0_ns = time.time_ns() - ago_ns
            frame = Frame(kind, registered["stream"], registered["epoch"], next(numbers), t0_ns, **more,
                          columns=columns or {}, body=body)  # fmt: skip
            link.send(encode(frame))

        send(Kind.GRAPH, body=document.model_dump(mode="json"))
        send(Kind.GRAPH_USED, body={"hash": graph_hash(document)})
        print(registered["job_id"], flush=True)
        _feed(send, link, options)
        send(Kind.GOODBYE, body={})


def _feed(send: Any, link: ClientConnection, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    num_ops = options.operators
    cost_ns = rng.lognormal(9.5, 1.0, num_ops)
    until = time.monotonic() + options.seconds
    tick, at = 0, 0
    while time.monotonic() < until:
        ops = (at + np.arange(min(num_ops, int(RUNS_PER_S * PERIOD_S)))) % num_ops
        at = int(ops[-1]) + 1
        total = (cost_ns[ops] * rng.uniform(0.8, 1.3, len(ops))).astype(np.uint64)
        ones = np.ones(len(ops), np.uint32)
        send(
            Kind.OP_SUMS, {Column.OP: ops, Column.COUNT: ones, Column.TOTAL_NS: total, Column.MAX_NS: total}, step=tick
        )
        if tick % STEP_EVERY == 0:
            link.send(json.dumps({"type": "beat"}))
            with contextlib.suppress(TimeoutError):
                while True:
                    link.recv(timeout=0)  # unread answers would hold the server's pongs up
            step = _step(options.slices, num_ops, cost_ns)
            span_ns = int((step[Column.START_NS] + step[Column.DURATION_NS]).max())
            send(Kind.OP_EVENTS, step, step=tick, flags=FLAG_WHOLE_STEP, ago_ns=span_ns)
        tick += 1
        time.sleep(PERIOD_S)


def _step(num_slices: int, num_ops: int, cost_ns: Array) -> dict[Column, Array]:
    """A step of `num_slices` runs on eight threads, one behind the other on each."""
    index = np.arange(num_slices)
    op, thread = index % num_ops, index % 8
    duration = cost_ns[op].astype(np.int64) // 8 + 50
    start = np.empty(num_slices, np.int64)
    for one in range(8):
        mine = thread == one
        start[mine] = np.cumsum(duration[mine]) - duration[mine]
    order = np.argsort(start, kind="stable")
    return {
        Column.START_NS: start[order],
        Column.DURATION_NS: duration[order],
        Column.OP: op[order],
        Column.THREAD: thread[order],
    }


if __name__ == "__main__":
    main()
