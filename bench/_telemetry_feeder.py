"""A trainer that sends whole steps of operator events at a given rate, as the server sees one.

Prints its job's id, waits for a line, sends, prints how many rows it has sent, waits for a line, and says goodbye.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from typing import Any

import numpy as np
from websockets.sync.client import connect

from bench._large_graph import large_graph
from penstock.protocol.frames import FLAG_WHOLE_STEP, Column, Frame, Kind, encode
from penstock.protocol.graphdoc import graph_hash

OPERATORS = 500
FRAMES_PER_S = 20
HEARTBEAT_EVERY = 20


def main() -> None:
    """Feed until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--events-per-s", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    token = sys.stdin.readline().strip()
    address = options.url.replace("http", "ws", 1) + "/api/v1/attach"
    with connect(address, additional_headers={"Authorization": f"Bearer {token}"}, compression=None) as link:
        who = {"role": "trainer", "index": 0, "host": socket.gethostname(), "pid": os.getpid()}
        link.send(json.dumps({"type": "register", "job_name": "events", **who}))
        registered = json.loads(link.recv())
        numbers = iter(range(2**62))

        def send(kind: Kind, **content: Any) -> None:
            link.send(encode(Frame(kind, registered["stream"], registered["epoch"], next(numbers), **content)))

        document = large_graph(OPERATORS)
        send(Kind.GRAPH, body=document.model_dump(mode="json"))
        send(Kind.GRAPH_USED, body={"hash": graph_hash(document)})
        print(registered["job_id"], registered["stream"], flush=True)
        sys.stdin.readline()
        print(_feed(send, link, options.events_per_s // FRAMES_PER_S, options.seconds), flush=True)
        while not _line_waits():
            _heartbeat(link)
            time.sleep(1)
        send(Kind.GOODBYE, body={})


def _feed(send: Any, link: Any, rows: int, seconds: float) -> int:
    at = np.arange(rows)
    columns = {
        Column.START_NS: at * 1000,
        Column.DURATION_NS: np.full(rows, 900),
        Column.OP: at % OPERATORS,
        Column.THREAD: at % 2,
    }
    began, sent = time.monotonic(), 0
    while (due := began + sent / FRAMES_PER_S) < began + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        if sent % HEARTBEAT_EVERY == 0:
            _heartbeat(link)
        sent += 1
        send(Kind.OP_EVENTS, t0_ns=time.time_ns() - rows * 1000, step=sent, flags=FLAG_WHOLE_STEP, columns=columns)
    return sent * rows


def _heartbeat(link: Any) -> None:
    link.send(json.dumps({"type": "beat"}))
    with contextlib.suppress(TimeoutError):
        while True:
            link.recv(timeout=0)  # unread answers would hold the server's pongs up


def _line_waits() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
