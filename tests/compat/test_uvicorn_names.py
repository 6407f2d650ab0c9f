"""Contracts of uvicorn's private names: a server of it over a real socket, whose client may not read."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tools import private_names
from websockets.asyncio.client import connect

from penstock.compat import uvicorn as private

_LARGE = bytes(32 << 20)  # more than the buffers of a socket hold


class Application:
    """Accepts a websocket, sends `payload`, closes with 4001; `closed` once the close frame is on its way."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.closed = asyncio.Event()
        self.handlers: list[object] = []

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        self.handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": self.payload})
        await send({"type": "websocket.close", "code": 4001, "reason": "enough"})
        self.closed.set()


@asynccontextmanager
async def serving(application: Application) -> AsyncIterator[int]:
    """Serve on a free port of this host until the block ends."""
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, ws=private.WebSocketProtocol, ws_per_message_deflate=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = private.SignalFreeServer(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            yield listener.getsockname()[1]
            server.should_exit = server.force_exit = True


async def _close_frame_does_not_wait_for_the_peer() -> None:
    application = Application(_LARGE)
    async with serving(application) as port, asyncio.timeout(5):
        await _never_reading(port, application)


async def _never_reading(port: int, application: Application) -> None:
    """Open a websocket and read nothing more, until the server has closed it."""
    connection = connect(f"ws://127.0.0.1:{port}/", max_queue=1, max_size=None, close_timeout=0)
    async with connection as websocket:
        websocket.transport.pause_reading()
        await application.closed.wait()
        websocket.transport.abort()


async def _signals_stay_those_of_the_process() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    application = Application(b"hello")
    async with serving(application) as port, connect(f"ws://127.0.0.1:{port}/") as websocket:
        assert await websocket.recv() == b"hello"
        await websocket.wait_closed()
        assert websocket.close_code == 4001
    assert application.handlers == before


CONTRACTS = {
    "WebSocketProtocol": _close_frame_does_not_wait_for_the_peer,
    "SignalFreeServer": _signals_stay_those_of_the_process,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(CONTRACTS))
async def test_uvicorn_keeps(name: str) -> None:
    await CONTRACTS[name]()


def test_every_name_of_uvicorn_has_a_contract() -> None:
    assert {entry.name for entry in private_names.entries(Path(private.__file__))} == set(CONTRACTS)
