"""Private and unstable names of uvicorn that the control plane needs: the only module that may touch one.

Invariant: as in `penstock.compat`; the contract tests are in `tests/compat/test_uvicorn_names.py`. A leaf that needs no
torch. Imported by `penstock_server` alone: the library runs without uvicorn's protocols being loaded.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.websockets import websockets_sansio_impl as _sansio

_LINGER_S = 10.0


class WebSocketProtocol(_sansio.WebSocketsSansIOProtocol):
    """Sends a close frame behind what is buffered; uvicorn waits for the peer to read, which a stalled one does not.

    A peer that does not take it within 10 s is cut off. Without it a stop of the server waits for such a browser.
    """

    async def send(self, message: Any) -> None:
        """Send one ASGI message; a close does not wait until the transport can be written."""
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
