"""Which connections may stay open: a peer that sends nothing, or half a request, must not keep others out.

A connection that owes a request has `head_s` for its head; a body has to come with `BODY_BYTES_PER_S` on average. When
more are open than the process has descriptors for, the one that has owed longest goes, before a request is answered or
an agent is cut off. One event loop; one timer for each connection that owes something.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)

BODY_BYTES_PER_S = 1024
SAY_EVERY_S = 10.0
MAX_CONNECTIONS = 16_384
RESERVED = 256
"""Descriptors for files, the database and what is accepted in one turn of the event loop."""
BACKLOG = 100
"""Connections that are accepted in one turn: each takes a descriptor before any of them can be closed."""


class Connection(Protocol):
    """What an admission ends."""

    def end(self) -> None:
        """Close it without an answer."""


@dataclass(slots=True)
class _Owing:
    """Since when a connection owes a request, or the rest of one, and what came of its body."""

    since: float
    is_body: bool = False
    num_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Admission:
    """The connections of one server that owe something, the oldest first."""

    head_s: float
    max_connections: int
    _owing: dict[Connection, _Owing] = field(default_factory=dict)
    num_ended: int = 0
    _said_at: float = float("-inf")
    now: Callable[[], float] = time.monotonic

    def opened(self, connection: Connection, num_open: int) -> None:
        """Note a new connection; if there are too many, end the one that has owed longest."""
        self._owe(connection)
        if num_open > self.max_connections:
            self._end(next(iter(self._owing)), "too many are open")

    def closed(self, connection: Connection) -> None:
        """Forget a connection that is closed, or is a websocket."""
        owing = self._owing.pop(connection, None)
        if owing is not None and owing.timer is not None:
            owing.timer.cancel()

    def received(self, connection: Connection, *, waits: bool, sends: bool, num_bytes: int) -> None:
        """Note what a connection is at. `waits`: for a request; `sends`: the rest of a body has to come."""
        owing = self._owing.get(connection)
        if not waits and not sends:
            self.closed(connection)
        elif owing is None:
            self._owe(connection, is_body=sends, num_bytes=num_bytes)
        elif owing.is_body != sends:
            owing.since, owing.is_body, owing.num_bytes = self.now(), sends, num_bytes
        else:
            owing.num_bytes += num_bytes

    def _owe(self, connection: Connection, *, is_body: bool = False, num_bytes: int = 0) -> None:
        self._owing[connection] = _Owing(self.now(), is_body, num_bytes)
        self._look_later(connection, self.head_s)

    def _look_later(self, connection: Connection, seconds: float) -> None:
        self._owing[connection].timer = asyncio.get_running_loop().call_later(seconds, self._look, connection)

    def _look(self, connection: Connection) -> None:
        owing = self._owing.get(connection)
        if owing is None:
            return
        left_s = owing.since + self.head_s - self.now()
        if owing.is_body:
            left_s += owing.num_bytes / BODY_BYTES_PER_S
        if left_s <= 0:
            self._end(connection, "the rest of its body did not come" if owing.is_body else "no request came")
        else:
            self._look_later(connection, left_s)

    def _end(self, connection: Connection, why: str) -> None:
        self.closed(connection)
        connection.end()
        self.num_ended += 1
        if self.now() - self._said_at >= SAY_EVERY_S:  # a line for each would fill the disk
            self._said_at = self.now()
            log.warning("connections are closed", why=why, in_all=self.num_ended)


def room_for_connections() -> int:
    """Allow this process all the descriptors that it may have; return how many connections fit beside the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    total = MAX_CONNECTIONS + RESERVED if hard == resource.RLIM_INFINITY else hard
    return min(MAX_CONNECTIONS, total - min(RESERVED, total // 2))


class AcceptErrors:
    """Handler of a loop's errors: one line in `SAY_EVERY_S` while no connection can be accepted.

    The event loop reports each one that it could not accept, with a traceback, up to `BACKLOG` a second.
    """

    def __init__(self) -> None:
        self._said_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take one error."""
        if "socket.accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - self._said_at >= SAY_EVERY_S:
            self._said_at = loop.time()
            log.error("no connection can be accepted", error=str(context.get("exception")))
