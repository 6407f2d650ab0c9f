"""The websocket of a process that a person started by hand."""

from __future__ import annotations

import asyncio

from fastapi import WebSocket

from penstock.errors import PeerError
from penstock.protocol.attach import FROM_PROCESS, Heartbeat, Register, Registered, Stored
from penstock.protocol.frames import Kind, decode, decode_header
from penstock.protocol.wire import parse
from penstock_server.auth.principal import scoped
from penstock_server.guard import principal_of
from penstock_server.routers.deps import runtime_of
from penstock_server.routers.guarded import guarded_router
from penstock_server.runtime import Runtime
from penstock_server.services.attach import outcome
from penstock_server.streams.ingest import FrameSender
from penstock_server.streams.socket import Outbox, close, converse, receive, send_outbox

router = guarded_router("/api/v1")

REGISTER_DEADLINE_S = 10.0


@router.websocket("/attach")
@scoped("attach")
async def attach(socket: WebSocket) -> None:
    """Serve one attached process until its connection ends."""
    runtime = runtime_of(socket)
    await socket.accept()
    outbox = Outbox()
    try:
        with runtime.held.by(principal_of(socket).token_id) as void:
            await converse(socket, _read(socket, runtime, outbox), send_outbox(socket, outbox), void)
    finally:
        await close(socket, 1000, "")


async def _read(socket: WebSocket, runtime: Runtime, outbox: Outbox) -> None:
    async with asyncio.timeout(REGISTER_DEADLINE_S):
        first = await receive(socket)
    if first is None:
        return
    register = parse(FROM_PROCESS, first) if isinstance(first, str) else None
    if not isinstance(register, Register):
        raise PeerError("the first message of an attached process has to be register")
    registered = await runtime.attach.register(register)
    try:
        await _serve(socket, runtime, outbox, registered)
    finally:
        runtime.attach.disconnected(registered.replica_id)


async def _serve(socket: WebSocket, runtime: Runtime, outbox: Outbox, registered: Registered) -> None:
    outbox.put("registered", registered.fields())
    sender = FrameSender(replica_id=registered.replica_id)
    seen = stored = -1
    while (message := await receive(socket)) is not None:
        if isinstance(message, bytes):
            seen = max(seen, _seq(message))
            header = await runtime.ingest.offer(sender, message)
            runtime.attach.renew(registered.replica_id)
            if header is not None and header.kind is Kind.GOODBYE:
                failed, error = outcome(decode(message).body)
                await runtime.metrics.settled()  # a client that sees the end can read all metrics
                await runtime.attach.goodbye(registered.replica_id, failed=failed, error=error)
        elif not isinstance(parse(FROM_PROCESS, message), Heartbeat):
            raise PeerError("register came twice on one connection")
        else:
            runtime.attach.renew(registered.replica_id)
            if await runtime.metrics.settled_soon():
                stored = seen
            outbox.put("beat", Stored(stored_seq=stored).fields())


def _seq(message: bytes) -> int:
    """Return the sequence number of a frame, taken or refused: neither has to be sent again. -1 if it is no frame."""
    try:
        return decode_header(message).seq
    except PeerError:
        return -1
