"""The agent's websocket: a thin shell between messages and services."""

from __future__ import annotations

import asyncio
import base64
import binascii
from contextlib import suppress

import structlog
from fastapi import WebSocket

from penstock.errors import PeerError
from penstock.protocol.agent import (
    FROM_AGENT,
    FromAgent,
    Heartbeat,
    Hello,
    LeaseRenewed,
    LogAck,
    LogBytes,
    ReplicaReport,
    StackAnswer,
    Welcome,
)
from penstock.protocol.states import TERMINAL_REPLICA, ReplicaState
from penstock.protocol.wire import parse
from penstock_server.auth.principal import scoped
from penstock_server.clock import unix_ns
from penstock_server.db import DatabaseAway
from penstock_server.guard import principal_of
from penstock_server.routers.deps import runtime_of
from penstock_server.routers.guarded import guarded_router
from penstock_server.runtime import Runtime
from penstock_server.services.reports import StaleEpoch
from penstock_server.streams.agents import AgentLink
from penstock_server.streams.ingest import FrameSender
from penstock_server.streams.socket import close, converse, receive, send_outbox

router = guarded_router("/api/v1")
log = structlog.get_logger(__name__)

HELLO_DEADLINE_S = 10.0


@router.websocket("/agent")
@scoped("agent")
async def agent(socket: WebSocket) -> None:
    """Serve one agent's connection until it ends."""
    runtime = runtime_of(socket)
    node_id = principal_of(socket).node_id
    assert node_id is not None  # scope agent is given to node tokens only
    await socket.accept()
    held = runtime.held.by(principal_of(socket).token_id)
    with structlog.contextvars.bound_contextvars(node=node_id), held as void:
        link = AgentLink(node_id, runtime.clock.monotonic())
        try:
            await converse(socket, _read(socket, runtime, link), send_outbox(socket, link.outbox), void)
        finally:
            is_last = runtime.agents.get(node_id) is link
            runtime.agents.disconnect(link)
            runtime.stacks.lost(link)
            if link.leaving and is_last:
                with suppress(DatabaseAway):  # its lease will expire
                    await runtime.nodes.left(node_id, link.leaving)
            await close(socket, 1000, "")
            log.info("agent disconnected")


async def _read(socket: WebSocket, runtime: Runtime, link: AgentLink) -> None:
    async with asyncio.timeout(HELLO_DEADLINE_S):
        first = await receive(socket)
    if first is None:
        return
    hello = parse(FROM_AGENT, first) if isinstance(first, str) else None
    if not isinstance(hello, Hello):
        raise PeerError("the first message of an agent has to be hello")
    await greet(runtime, link, hello)
    while (message := await receive(socket)) is not None:
        await take(runtime, link, message)


async def take(runtime: Runtime, link: AgentLink, message: str | bytes) -> None:
    """Take one message of an agent that was greeted. Raises PeerError, DatabaseAway."""
    runtime.leases.renew(link.node_id)
    link.heard_at = runtime.clock.monotonic()
    if isinstance(message, bytes):
        await runtime.ingest.offer(FrameSender(node_id=link.node_id), message)
    else:
        await _message(runtime, link, parse(FROM_AGENT, message))


async def greet(runtime: Runtime, link: AgentLink, hello: Hello) -> None:
    """Take an agent's first message. Raises Conflict if another agent is this node, DatabaseAway."""
    link.stays_until(hello.pilot)
    link.instance, link.heard_at = hello.instance, runtime.clock.monotonic()
    link.takes_stacks, link.records = hello.takes_stacks, hello.records
    runtime.agents.connect(link, alive_s=runtime.settings.lease_ttl_s)
    runtime.leases.arrives(link.node_id)
    link.missing = await runtime.reports.hello(link.node_id, hello)
    runtime.leases.connected(link.node_id)
    offsets = await runtime.log_offsets(link.node_id)
    settings = runtime.settings
    ttl_s, grace_s = settings.lease_ttl_s, settings.grace_s
    welcome = Welcome(node_id=link.node_id, lease_ttl_s=ttl_s, grace_s=grace_s, log_offsets=offsets)
    link.outbox.put("welcome", welcome.fields())
    link.greeted = True
    await runtime.publisher.push_desired(link.node_id)
    log.info("agent connected", version=hello.version, replicas=len(hello.replicas), missing=len(link.missing))


async def _message(runtime: Runtime, link: AgentLink, message: FromAgent) -> None:
    match message:
        case Heartbeat(leaving=leaving, clock=offset):
            received_ns = unix_ns(runtime.clock.now())
            runtime.agents.loads.note(
                link.node_id, received_ns / 1e9,
                cpu_percent=message.cpu_percent, memory_used_bytes=message.memory_used_bytes,
            )  # fmt: skip
            if offset is not None and runtime.agents.note_clock(link, offset):
                runtime.publisher.mark_clocks()
            if message.disk is not None and runtime.agents.note_disk(link, message.disk):
                runtime.publisher.mark_nodes()
                runtime.scheduling.wake()
            if message.ends_in_s is not None:
                link.ends_at = runtime.clock.monotonic() + message.ends_in_s
            if leaving and not link.leaving:
                link.leaving = leaving
                await runtime.nodes.leave(link.node_id, leaving)  # before the answer: no placement follows that
            # The agent keeps vital frames until a heartbeat after them is answered with `stored`. Its lease it gets in
            # any case: a database that is unreachable must not cost it.
            stored = await runtime.metrics.settled_soon()
            answer = LeaseRenewed(
                ttl_s=runtime.settings.lease_ttl_s, stored=stored,
                received_ns=received_ns, answered_ns=unix_ns(runtime.clock.now()),
            )  # fmt: skip
            link.outbox.put("lease", answer.fields())
        case ReplicaReport():
            await _report(runtime, link, message)
        case LogBytes():
            await _log(runtime, link, message)
        case StackAnswer():
            runtime.stacks.answered(link, message)
        case Hello():
            raise PeerError("hello came twice on one connection")


async def _report(runtime: Runtime, link: AgentLink, message: ReplicaReport) -> None:
    link.missing.discard(message.replica_id)
    if ReplicaState(message.state) in TERMINAL_REPLICA:
        await runtime.metrics.settled()  # a client that sees the end can read all metrics
    try:
        await runtime.reports.report(link.node_id, message)
    except StaleEpoch as error:
        runtime.meters.refused.labels("stale_epoch").inc()
        log.warning("report refused", error=str(error))
        await runtime.publisher.push_desired(link.node_id)  # so that the agent ends what is over
    except PeerError as error:
        runtime.meters.refused.labels("foreign_replica").inc()
        log.warning("report refused", error=str(error))


async def _log(runtime: Runtime, link: AgentLink, message: LogBytes) -> None:
    job_id = await runtime.reports.job_of(link.node_id, message.replica_id, message.epoch)
    if job_id is None:
        runtime.meters.refused.labels("foreign_log").inc()
        return
    try:
        content = base64.b64decode(message.text_b64, validate=True)
    except binascii.Error as error:
        raise PeerError(f"text_b64 of a log message is no base64: {error}") from error
    taken = runtime.ingest.take_log(job_id, message.replica_id, message.offset, content)
    ack = LogAck(replica_id=message.replica_id, log_offset=taken.next_offset, full=taken.full)
    link.outbox.put(f"ack:{message.replica_id}", ack.fields())
