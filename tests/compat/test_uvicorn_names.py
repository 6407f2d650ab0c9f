"""Contracts of uvicorn's private names: a server of it over a real socket, whose client may not read."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trustme
import uvicorn
from tools import private_names
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from penstock.compat import uvicorn as private

_LARGE = bytes(32 << 20)  # more than the buffers of a socket hold
_PAUSED_S, _ENDS_S = 0.2, 60.0


class Application:
    """Accepts a websocket, sends `payload` and one more message, closes with 4001.

    `paused`: the second message has waited for the peer to read. `closed`: the close frame is on its way, or the peer
    is gone. `patient`: the second message waits as long as it has to.
    """

    def __init__(self, payload: bytes, *, patient: bool = False) -> None:
        self.payload, self.patient = payload, patient
        self.paused, self.closed = asyncio.Event(), asyncio.Event()
        self.handlers: list[object] = []

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        self.handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": self.payload})
        second = asyncio.ensure_future(send({"type": "websocket.send", "bytes": b"more"}))
        await asyncio.wait([second], timeout=_PAUSED_S)
        if not second.done():
            self.paused.set()
        with suppress(OSError):  # as uvicorn raises when the peer is gone
            await self._finish(second, send)
        self.closed.set()

    async def _finish(self, second: asyncio.Future[Any], send: Callable[..., Any]) -> None:
        if self.patient or second.done():
            await second
        second.cancel()
        await send({"type": "websocket.close", "code": 4001, "reason": "enough"})


@asynccontextmanager
async def serving(application: Callable[..., Any], **options: Any) -> AsyncIterator[int]:
    """Serve on a free port of this host until the block ends."""
    given = {"ws": private.WebSocketProtocol, **options}
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, ws_per_message_deflate=False, timeout_graceful_shutdown=1, **given
    )
    server = private.SignalFreeServer(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            yield listener.getsockname()[1]
            server.should_exit = server.force_exit = True


async def _peers_that_stall_or_are_gone_hold_nothing_up() -> None:
    await _a_stalled_peer_holds_up_data_and_no_end()
    await _a_peer_that_is_gone_takes_no_message()


async def _a_stalled_peer_holds_up_data_and_no_end() -> None:
    for patient in (False, True):
        application = Application(_LARGE, patient=patient)
        async with serving(application) as port, asyncio.timeout(_ENDS_S):
            await _stalled(port, application)


async def _a_peer_that_is_gone_takes_no_message() -> None:
    refused = asyncio.Event()

    async def application(_scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        gone.transport.abort()  # the event loop gets no turn before the next message
        with pytest.raises(OSError, match="gone"):
            await send({"type": "websocket.send", "bytes": b"more"})
        refused.set()

    gone: Any = None

    class Known(private.WebSocketProtocol):
        def connection_made(self, transport: Any) -> None:
            nonlocal gone
            gone = self
            super().connection_made(transport)

    async with serving(application, ws=Known) as port, connect(f"ws://127.0.0.1:{port}/", close_timeout=0) as websocket:
        await websocket.send(b"now")
        async with asyncio.timeout(_ENDS_S):
            await refused.wait()


async def _stalled(port: int, application: Application) -> None:
    """Open a websocket and read nothing. Is gone as soon as the server waits for it, if that one is patient."""
    async with connect(f"ws://127.0.0.1:{port}/", max_queue=1, max_size=None, close_timeout=0) as websocket:
        websocket.transport.pause_reading()
        await application.paused.wait()
        if application.patient:
            websocket.transport.abort()
        await application.closed.wait()
        websocket.transport.abort()


async def _signals_stay_those_of_the_process() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    application = Application(b"hello")
    async with serving(application) as port, connect(f"ws://127.0.0.1:{port}/") as websocket:
        assert [await websocket.recv(), await websocket.recv()] == [b"hello", b"more"]
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4001
    assert application.handlers == before


class Admission:
    """Notes what connections report."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def opened(self, connection: private.HttpProtocol, num_open: int) -> None:
        self.seen.append(("opened", num_open))

    def closed(self, connection: private.HttpProtocol) -> None:
        self.seen.append(("closed",))

    def received(self, connection: private.HttpProtocol, *, waits: bool, sends: bool, num_bytes: int) -> None:
        self.seen.append((waits, sends, num_bytes))
        if num_bytes == len(_BODY[1]):
            connection.end()


_BODY = (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n", b"ab")


async def _connections_report_what_peers_send() -> None:
    admission = Admission()
    application = Application(b"hello")
    async with serving(application, http=partial(private.HttpProtocol, admission)) as port:
        async with connect(f"ws://127.0.0.1:{port}/") as websocket:
            assert await websocket.recv() == b"hello"
            assert admission.seen[0] == ("opened", 1) and admission.seen[-1] == ("closed",)
        admission.seen.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError):
            for part in (b"POST", _BODY[0][4:], _BODY[1]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.05)
            assert await reader.read() in (b"", b"Internal Server Error")
        writer.close()
    states = [entry[:2] for entry in admission.seen if len(entry) == 3]
    assert states[0] == (True, False) and (False, True) in states
    assert admission.seen[-1] == ("closed",)


async def _certificates_of_peers_are_in_the_state() -> None:
    authority, seen = trustme.CA(), list[Any]()

    async def application(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        seen.append(scope["state"].get(private.PEER_CERTIFICATE))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b""})

    with TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("server.pem", "authority.pem")]
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(paths[0])
        authority.cert_pem.write_to_path(paths[1])
        options = {"ssl_certfile": paths[0], "ssl_ca_certs": paths[1], "ssl_cert_reqs": ssl.CERT_OPTIONAL}
        http = partial(private.HttpProtocol, Admission())
        async with serving(application, http=http, **options) as port, asyncio.timeout(_ENDS_S):
            for name in ("node-a", None):
                client = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
                if name is not None:
                    authority.issue_cert(name).configure_cert(client)
                reader, writer = await asyncio.open_connection("localhost", port, ssl=client)
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                await reader.read()
                writer.close()
    assert seen[0]["subjectAltName"] == (("DNS", "node-a"),)
    assert seen[1] is None


CONTRACTS = {
    "PEER_CERTIFICATE": _certificates_of_peers_are_in_the_state,
    "HttpProtocol": _connections_report_what_peers_send,
    "WebSocketProtocol": _peers_that_stall_or_are_gone_hold_nothing_up,
    "SignalFreeServer": _signals_stay_those_of_the_process,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(CONTRACTS))
async def test_uvicorn_keeps(name: str) -> None:
    await CONTRACTS[name]()


def test_every_name_of_uvicorn_has_a_contract() -> None:
    assert {entry.name for entry in private_names.entries(Path(private.__file__))} == set(CONTRACTS)
