"""A link of a chosen rate: a relay on this host between a trainer's channels and a parameter server.

It stands behind the greeting: a channel is opened as ever, and its connection is then led through two threads that pass
bytes on at the rate, with small buffers, so that who sends waits as before a slow network interface.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from penstock.ps.transport.frames import Connection
from penstock.ps.transport.tcp import Route
from penstock.ps.wire import Message

PIECE = 16 << 10
BUFFER = 64 << 10


@contextlib.contextmanager
def slow_link(endpoint: str, bytes_per_s: float) -> Iterator[None]:
    """Lead channels to `endpoint` that are opened meanwhile over a link of this rate, each way. Not shared memory."""
    opens = Route.open_channel

    def through(self: Route, message: Message, *, deadline_s: float) -> tuple[Connection, list[str]]:
        descriptor, blocks = opens(self, message, deadline_s=deadline_s)
        if self.address.endpoint != endpoint:
            return descriptor, blocks
        assert isinstance(descriptor, int), "no TLS here"
        return relayed(socket.socket(fileno=descriptor), bytes_per_s), blocks

    Route.open_channel = through  # type: ignore[method-assign]  # for a while
    try:
        yield
    finally:
        Route.open_channel = opens  # type: ignore[method-assign]


def relayed(far: socket.socket, bytes_per_s: float) -> int:
    """Return a descriptor whose bytes pass to `far` and back at the rate, until either end is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        near.connect(listening.getsockname())
        inner, _ = listening.accept()
    for one in (near, inner, far):
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_relay, args=(inner, far, bytes_per_s), daemon=True).start()
    return near.detach()


def _relay(inner: socket.socket, far: socket.socket, bytes_per_s: float) -> None:
    with inner, far:
        back = threading.Thread(target=_pass_on, args=(far, inner, bytes_per_s), daemon=True)
        back.start()
        _pass_on(inner, far, bytes_per_s)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket, bytes_per_s: float) -> None:
    free_at = time.monotonic()  # when the link can take the next byte
    with contextlib.suppress(OSError):  # closed
        while piece := source.recv(PIECE):
            free_at = max(free_at, time.monotonic()) + len(piece) / bytes_per_s
            time.sleep(max(0.0, free_at - time.monotonic()))
            target.sendall(piece)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
