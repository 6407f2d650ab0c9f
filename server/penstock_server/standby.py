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
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from penstock.errors import Unavailable
from penstock_server.admission import BACKLOG, room_for_connections
from penstock_server.db import DatabaseInUse
from penstock_server.problems import MEDIA_TYPE
from penstock_server.runtime import Runtime, open_runtime
from penstock_server.settings import Settings
from penstock_server.statedir import InUse, read_address, was_used

TRY_EVERY_S = 0.2
CONNECT_S = 5.0
LINGER_S = 1.0
"""After the server that leads has ended a connection, its client has so long to end its own side."""
STALLED_S = 60.0
"""A side that takes nothing of what is sent to it for so long is cut off."""
CHUNK_BYTES = 64 << 10
ANYWHERE = frozenset({"0.0.0.0", "::", "127.0.0.1", "::1", "localhost"})
"""Addresses that mean another machine on each machine."""

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
    if isinstance(error, DatabaseInUse) and not was_used(settings.state_dir):
        raise Unavailable(
            f"{error} No server has used the state folder {settings.state_dir} yet: a standby needs the folder of the "
            "server that leads, on several machines a shared one."
        ) from error
    stopped, said = asyncio.Event(), ""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with _passing_on(settings, listener):
        log.info("server stands by", leader=read_address(settings.state_dir), state_dir=str(settings.state_dir))
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), TRY_EVERY_S)
            if stopped.is_set():
                return None
            try:
                runtime = await stack.enter_async_context(open_runtime(settings))
            except InUse:
                continue
            except (Unavailable, OSError) as met:  # it may pass: a database that cannot be reached
                if str(met) != said:
                    log.warning("server cannot take over yet", error=str(met))
                said = str(met)
                continue
            if stopped.is_set():
                return None
            log.info("server takes over")
            return runtime


@asynccontextmanager
async def _passing_on(settings: Settings, listener: socket.socket) -> AsyncIterator[None]:
    """Accept connections of the listener in this block. At its end those that are open end; the listener stays."""
    own: tuple[str, int] = listener.getsockname()[:2]
    passage = Passage(settings.state_dir, own, says_why=settings.tls_cert is None)
    server = await asyncio.start_server(passage.serve, sock=listener.dup(), backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
        await passage.end()


class Passage:
    """Connections that are passed on to the server that leads. `says_why`: without one they get an answer of HTTP.

    `own`: the address at which they come, so that none is passed on to this very server. Which requests are late the
    server that leads decides (`admission`); of too many connections the oldest that it has not answered goes.
    """

    def __init__(
        self, state_dir: Path, own: tuple[str, int], *, says_why: bool, max_open: int | None = None
    ) -> None:  # fmt: skip
        self._state_dir, self._own, self._says_why = state_dir, own, says_why
        self._open: set[asyncio.Task[None]] = set()
        self._unanswered: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._max_open = room_for_connections() // 2 if max_open is None else max_open  # each takes two descriptors

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until both sides have ended it."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= self._max_open:
            oldest = next(iter(self._unanswered), None)
            if oldest is None:
                writer.transport.abort()
                return
            del self._unanswered[oldest]
            oldest.cancel()
        self._open.add(task)
        self._unanswered[task] = None
        try:
            with suppress(OSError, TimeoutError):
                await self._serve(reader, writer, task)
        except asyncio.CancelledError:  # not raised on: Python 3.11 would report a callback that was cancelled
            writer.transport.abort()
        finally:
            self._open.discard(task)
            self._unanswered.pop(task, None)
            writer.close()
            if writer.transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(STALLED_S, writer.transport.abort)

    async def num_open(self) -> int:
        """Return how many connections are passed on now."""
        return len(self._open)

    async def end(self) -> None:
        """End what is open."""
        ending = list(self._open)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:  # fmt: skip
        try:
            async with asyncio.timeout(CONNECT_S):
                from_leader, to_leader = await asyncio.open_connection(*self._leader())
        except (OSError, TimeoutError):
            if self._says_why:
                writer.write(_NO_LEADER)
                await writer.drain()
            return
        up = asyncio.create_task(_copy(reader, to_leader))
        down = asyncio.create_task(_copy(from_leader, writer, lambda: self._unanswered.pop(task, None)))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()
                await down
            else:
                down.result()
                await asyncio.wait([up], timeout=LINGER_S)
        finally:
            if up.cancel():
                to_leader.transport.abort()
            to_leader.close()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    def _leader(self) -> tuple[str, int]:
        """Return where the server listens that leads. Raises OSError if there is none, or its address is our own."""
        url = read_address(self._state_dir)
        if url is None:
            raise OSError("no server leads")
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
        if port == self._own[1] and (host == self._own[0] or host in ANYWHERE):
            log.warning(
                "the server that leads gives this server's own address: start it with --advertise-host", url=url
            )
            raise OSError(f"{url} is this server's own address")
        return host, port


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_first: Callable[[], object] = lambda: None
) -> None:
    """Copy to the end, then end the other direction, too. Raises TimeoutError if the other side takes nothing."""
    while chunk := await reader.read(CHUNK_BYTES):
        on_first()
        writer.write(chunk)
        async with asyncio.timeout(STALLED_S):
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
