"""Private and unstable names of uvicorn that the control plane needs: the only module that may touch one.

Invariant: as in `penstock.compat`; the contract tests are in `tests/compat/test_uvicorn_names.py`. A leaf that needs no
torch. Imported by `penstock_server` alone: the library runs without uvicorn's protocols being loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import h11
import uvicorn
from uvicorn.protocols.http import h11_impl as _h11
from uvicorn.protocols.websockets import websockets_sansio_impl as _sansio

_LINGER_S = 10.0
PEER_CERTIFICATE = "peer_certificate"
"""Key of a scope's `state`: the verified certificate of the peer, as `ssl.SSLSocket.getpeercert` describes it."""


class _Admission(Protocol):
    """Which connections may stay. `sends`: part of a request has come, and more has to."""

    def opened(self, connection: HttpProtocol, num_open: int) -> None: ...

    def closed(self, connection: HttpProtocol) -> None: ...

    def received(self, connection: HttpProtocol, *, waits: bool, sends: bool, num_bytes: int) -> None: ...


class HttpProtocol(_h11.H11Protocol):
    """Reports to an admission what its peer has sent; uvicorn waits for the rest of a request for ever.

    Its first argument is given with `functools.partial`. A connection that becomes a websocket is reported as closed.
    """

    def __init__(self, admission: _Admission, **options: Any) -> None:
        super().__init__(**options)
        self._admission = admission

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with a connection that has sent nothing."""
        assert isinstance(transport, asyncio.Transport)
        shown = transport.get_extra_info("peercert")  # empty unless one came and was verified
        if shown:
            self.app_state = {**self.app_state, PEER_CERTIFICATE: shown}  # a copy of it is each scope's `state`
        super().connection_made(transport)
        self._admission.opened(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Take bytes of the peer."""
        super().data_received(data)
        self._report(len(data))

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        self._report(0)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._admission.closed(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection without an answer."""
        self.transport.abort()

    def _report(self, num_bytes: int) -> None:
        if self not in self.connections:  # it is a websocket by now
            self._admission.closed(self)
            return
        state = self.conn.their_state
        waits, sends = state is h11.IDLE, state is h11.SEND_BODY
        self._admission.received(self, waits=waits, sends=sends, num_bytes=num_bytes)


class WebSocketProtocol(_sansio.WebSocketsSansIOProtocol):
    """Sends a close frame behind what is buffered; uvicorn waits for the peer to read, which a stalled one does not.

    A peer that does not take it within 10 s is cut off. Without it a stop of the server waits for such a browser.
    A message for a peer that is gone raises OSError at once; uvicorn writes on until the event loop has had a turn,
    which a sender with much to send does not give it.
    """

    async def send(self, message: Any) -> None:
        """Send one ASGI message; a close does not wait until the transport can be written."""
        is_lost = self.handshake_complete and not self.close_sent and self.transport.is_closing()
        if is_lost and message["type"] == "websocket.send":
            raise ConnectionResetError("the peer of this websocket is gone")
        if message["type"] == "websocket.close" and self.handshake_complete:
            self.writable.set()
            self.loop.call_later(_LINGER_S, self.transport.abort)
        await super().send(message)


class SignalFreeServer(uvicorn.Server):
    """Takes no signals; uvicorn raises one again when it has stopped, and the runtime would not be closed."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the handlers of the process as they are."""
        yield
