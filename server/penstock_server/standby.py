"""A server beside the one that leads: it passes connections on to that one, and leads once no other does.

Who leads, the lock of the state folder says, and on PostgreSQL that of the database as well: there is one owner of all
jobs and of their streams at any time. What the others get they pass on byte by byte, TLS included, so that certificates
of agents reach the server that checks them. The state folder is the same for all: it holds logs, telemetry, snapshots
and the key of the tokens.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from penstock.errors import Unavailable
from penstock_server.admission import BACKLOG, room_for_connections
from penstock_server.db import DatabaseAway, DatabaseInUse
from penstock_server.problems import MEDIA_TYPE
from penstock_server.runtime import Runtime, open_runtime
from penstock_server.settings import Settings
from penstock_server.statedir import InUse, read_address

TRY_EVERY_S = 0.2
CONNECT_S = 5.0
LINGER_S = 10.0
"""After the server that leads has ended a connection, its client has so long to end its own side."""
CHUNK_BYTES = 64 << 10

log = structlog.get_logger(__name__)


@asynccontextmanager
async def opened_in_turn(settings: Settings, listener: socket.socket) -> AsyncIterator[Runtime | None]:
    """Open the runtime; with `standby`, once no other server has it. Yields None if a signal came before.

    Raises Unavailable if it cannot be opened, or if another server has it and this one is no standby.
    """
    async with AsyncExitStack() as stack:
        try:
            runtime: Runtime | None = await stack.enter_async_context(open_runtime(settings))
        except InUse as error:
            if not settings.standby:
                raise
            runtime = await _wait(settings, listener, stack, error)
        yield runtime


async def _wait(settings: Settings, listener: socket.socket, stack: AsyncExitStack, error: InUse) -> Runtime | None:
    if isinstance(error, DatabaseInUse) and read_address(settings.state_dir) is None:
        raise Unavailable(
            f"{error} No server has used the state folder {settings.state_dir} yet: a standby needs the folder of the "
            "server that leads, on several machines a shared one."
        ) from error
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with _passing_on(settings, listener):
        log.info("server stands by", leader=read_address(settings.state_dir), state_dir=str(settings.state_dir))
        while not stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), TRY_EVERY_S)
            with suppress(InUse, DatabaseAway):
                runtime = await stack.enter_async_context(open_runtime(settings))
                log.info("server takes over")
                return runtime
    return None


@asynccontextmanager
async def _passing_on(settings: Settings, listener: socket.socket) -> AsyncIterator[None]:
    """Accept connections of the listener in this block. At its end those that are open end; the listener stays."""
    passage = Passage(settings.state_dir, says_why=settings.tls_cert is None)
    server = await asyncio.start_server(passage.serve, sock=listener.dup(), backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
        await passage.end()


class Passage:
    """Connections that are passed on to the server that leads. `says_why`: without one they get an answer of HTTP."""

    def __init__(self, state_dir: Path, *, says_why: bool) -> None:
        self._state_dir, self._says_why = state_dir, says_why
        self._open: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self._room = room_for_connections() // 2  # each takes two descriptors

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until both sides have ended it."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) <= self._room:
                with suppress(OSError):
                    await self._serve(reader, writer)
        except asyncio.CancelledError:
            if not self._is_ending:  # asyncio's streams of Python 3.11 report a callback that was cancelled
                raise
        finally:
            self._open.discard(task)
            writer.close()

    async def num_open(self) -> int:
        """Return how many connections are passed on now."""
        return len(self._open)

    async def end(self) -> None:
        """End what is open."""
        self._is_ending, ending = True, list(self._open)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            address = urlsplit(read_address(self._state_dir) or "")
            async with asyncio.timeout(CONNECT_S):
                theirs = await asyncio.open_connection(address.hostname or "", address.port or 0)
        except (OSError, TimeoutError):
            if self._says_why:
                writer.write(_NO_LEADER)
                await writer.drain()
            return
        try:
            to_leader = asyncio.create_task(_copy(reader, theirs[1]))
            try:
                await _copy(theirs[0], writer)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await to_leader
            finally:
                to_leader.cancel()
                await asyncio.wait([to_leader])
                if not to_leader.cancelled():
                    to_leader.exception()  # the client is gone
        finally:
            theirs[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end, then end the other direction, too."""
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _no_leader() -> bytes:
    problem = {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "no server leads at the moment; a standby takes over within seconds",
        "code": "no_leader",
    }
    body = json.dumps(problem).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_NO_LEADER = _no_leader()
