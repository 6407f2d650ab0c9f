"""The two sides of a websocket: one reads, one sends. Messages never pile up: under one key only the newest waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from penstock.errors import PeerError, Unavailable
from penstock_server.problems import Problem

log = structlog.get_logger(__name__)

MALFORMED = 4400
TRY_AGAIN = 1013
REVOKED = 4401
REFUSED = 4403
SEND_DEADLINE_S = 10.0
CLOSE_DEADLINE_S = 5.0


class Outbox:
    """What waits to be sent on one websocket. Bounded by the number of keys. One event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, str] = {}
        self._event = asyncio.Event()
        self.closed_with: tuple[int, str] | None = None

    def put(self, key: str, message: Mapping[str, Any]) -> None:
        """Queue a message; it replaces one of the same key that waits, and goes to the end."""
        self._waiting.pop(key, None)
        self._waiting[key] = json.dumps(message, separators=(",", ":"))
        self._event.set()

    def close(self, code: int, reason: str) -> None:
        """Have the connection closed with this code, without sending what waits."""
        self.closed_with = (code, reason)
        self._event.set()

    def pop(self) -> str | None:
        """Return the next message that waits, or None."""
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    async def get(self) -> str | None:
        """Return the next message, or None once the box is closed."""
        while True:
            if self.closed_with is not None:
                return None
            if (text := self.pop()) is not None:
                return text
            self._event.clear()
            await self._event.wait()


async def receive(socket: WebSocket) -> str | bytes | None:
    """Return the next message, or None once the peer is gone."""
    try:
        message = await socket.receive()
    except RuntimeError:  # receive after a disconnect, when both sides noticed at once
        return None
    if message["type"] == "websocket.disconnect":
        return None
    text: str | None = message.get("text")
    content: bytes | None = message.get("bytes")
    return text if text is not None else content


async def send_outbox(socket: WebSocket, outbox: Outbox) -> None:
    """Send what is put into the outbox until it, or the socket, is closed."""
    while (text := await outbox.get()) is not None and socket.application_state is WebSocketState.CONNECTED:
        async with asyncio.timeout(SEND_DEADLINE_S):
            await socket.send_text(text)
    if outbox.closed_with is not None:
        await close(socket, *outbox.closed_with)


async def converse(
    socket: WebSocket, reader: Coroutine[Any, Any, None], sender: Coroutine[Any, Any, None], void: asyncio.Event
) -> None:
    """Run both sides until the reader ends. A peer that breaks the contract gets the reason, and is closed.

    So is one whose token is `void`.

    The reader is never cancelled by a failing sender: it may be in a transaction. A sender that cannot go on
    closes the socket, and the reader learns of that from `receive`.
    """
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(_sending(socket, sender))
        watching = group.create_task(_watch(socket, void))
        try:
            await reader
        except TimeoutError:
            await close(socket, 1001, "no message came in time")
        except PeerError as error:
            await close(socket, MALFORMED, str(error))
        except Unavailable as error:
            log.warning("connection closed", reason=str(error))
            await close(socket, TRY_AGAIN, str(error))
        except Problem as error:
            await close(socket, REFUSED, str(error))
        finally:
            sending.cancel()
            watching.cancel()


async def _watch(socket: WebSocket, void: asyncio.Event) -> None:
    await void.wait()
    await close(socket, REVOKED, "the token or session of this connection has ended")


async def _sending(socket: WebSocket, sender: Coroutine[Any, Any, None]) -> None:
    try:
        await sender
    except (WebSocketDisconnect, TimeoutError, OSError):
        await close(socket, 1001, "the peer takes no messages")


async def close(socket: WebSocket, code: int, reason: str) -> None:
    """Close a websocket if it is still open."""
    if socket.application_state is WebSocketState.CONNECTED:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                # A close frame holds at most 123 bytes of reason.
                await socket.close(code, reason.encode()[:120].decode(errors="ignore"))
        except (RuntimeError, OSError, WebSocketDisconnect, TimeoutError):
            return  # closed by the peer in the meantime
