"""Run the two sides of a websocket together: one reads, one sends; when one ends, so does the other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from penstock.errors import PeerError
from penstock_server.problems import Problem
from penstock_server.streams.outbox import Outbox

MALFORMED = 4400
REFUSED = 4403
SEND_DEADLINE_S = 10.0
CLOSE_DEADLINE_S = 5.0


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
    """Send what is put into the outbox until it is closed."""
    while (text := await outbox.get()) is not None:
        async with asyncio.timeout(SEND_DEADLINE_S):
            await socket.send_text(text)
    if outbox.closed_with is not None:
        await close(socket, *outbox.closed_with)


async def both(reader: Coroutine[Any, Any, None], sender: Coroutine[Any, Any, None]) -> None:
    """Run both until the first ends; cancel the other. Raises what the first one raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader), group.create_task(sender)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def converse(socket: WebSocket, reader: Coroutine[Any, Any, None], sender: Coroutine[Any, Any, None]) -> None:
    """Like `both`; a peer that breaks the contract is told so and closed, one that is gone is gone."""
    try:
        await both(reader, sender)
    except* (WebSocketDisconnect, TimeoutError, OSError):
        await close(socket, 1001, "")
    except* PeerError as group:
        await close(socket, MALFORMED, str(group.exceptions[0]))
    except* Problem as group:
        await close(socket, REFUSED, str(group.exceptions[0]))


async def close(socket: WebSocket, code: int, reason: str) -> None:
    """Close a websocket if it is still open."""
    if socket.application_state is WebSocketState.CONNECTED:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                # A close frame holds at most 123 bytes of reason.
                await socket.close(code, reason.encode()[:120].decode(errors="ignore"))
        except (RuntimeError, OSError, WebSocketDisconnect, TimeoutError):
            return  # closed by the peer in the meantime
