"""Browsers of one job without a screen: those that read all, counting, and those that never read.

Reads commands from stdin, one a line: `watch N` (so many that read; answers when all have their snapshot), `stall N`
(so many more that do not), `counts` (of the first one that reads: rows of operator events, and rows of gaps).
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from penstock.protocol.frames import Kind, decode_header

STALLED_BUFFER = 4096
READY_S = 60.0


class Reader:
    """One that reads all."""

    def __init__(self, link: ClientConnection) -> None:
        self.rows = self.gaps = 0
        self.link, self.ready = link, threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self.link:
                self._take(message)
        except ConnectionClosed:
            return

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            header = decode_header(message)
            self.rows += header.count if header.kind is Kind.OP_EVENTS else 0
            return
        said: dict[str, Any] = json.loads(message)
        if said["type"] == "snapshot":
            self.ready.set()
        elif said["type"] == "gap":
            self.gaps += said["dropped"].get("OP_EVENTS", 0)


def main() -> None:
    """Do what is said until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args()
    token = sys.stdin.readline().strip()
    readers: list[Reader] = []
    stalled: list[ClientConnection] = []
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "watch":
            while len(readers) > int(number):
                readers.pop().link.close()
            while len(readers) < int(number):
                readers.append(Reader(_subscribed(options, token)))
            print(all(reader.ready.wait(READY_S) for reader in readers), flush=True)
        elif command == "stall":
            stalled += [_subscribed(options, token, max_queue=1, buffer=STALLED_BUFFER) for _ in range(int(number))]
            print(True, flush=True)
        elif command == "counts":
            print(readers[0].rows, readers[0].gaps, flush=True)


def _subscribed(
    options: argparse.Namespace, token: str, *, max_queue: int = 64, buffer: int | None = None
) -> ClientConnection:
    parts = urlsplit(options.url)
    plain = socket.socket()
    if buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    plain.connect((parts.hostname, parts.port))
    address = options.url.replace("http", "ws", 1) + "/api/v1/stream"
    headers = {"Authorization": f"Bearer {token}"}
    link = connect(
        address, sock=plain, additional_headers=headers, compression=None, max_size=None, max_queue=max_queue,
        ping_interval=None,
    )  # fmt: skip
    link.send(json.dumps({"type": "subscribe", "id": 1, "topic": "job", "job_id": options.job}))
    return link


if __name__ == "__main__":
    main()
