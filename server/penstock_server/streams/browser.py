"""One browser's connection: its subscriptions, and the task that sends what waits for it."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from penstock.errors import PeerError
from penstock.protocol.frames import Kind, decode, decode_header
from penstock.protocol.stream import LogAdded, ServerMessage, StreamGraph
from penstock_server.clock import Clock
from penstock_server.instruments import Instruments
from penstock_server.secrecy import ALL, Sight
from penstock_server.settings import Settings
from penstock_server.streams.hub import Hub, Subscription, offer
from penstock_server.streams.logstore import LogStore
from penstock_server.streams.queue import SLOW, BrowserQueue, Encoded, LogWish, encode

log = structlog.get_logger(__name__)

LOG_PIECE_BYTES = 64 << 10
MAX_SUBSCRIPTIONS = 64
MAX_REPLAY_BYTES = 768 << 10
SEND_DEADLINE_S = 10.0


class Socket(Protocol):
    """What a browser's connection can do."""

    async def send_text(self, data: str) -> None:
        """Send a text message; returns when the transport took it."""

    async def send_bytes(self, data: bytes) -> None:
        """Send a binary message; returns when the transport took it."""


class SlowBrowser(Exception):
    """The browser could not keep up; its connection is to be closed with `SLOW`."""

    code = SLOW


class Browser:
    """Subscriptions and sender of one connection. Publishing to it never waits for it."""

    def __init__(
        self, socket: Socket, settings: Settings, clock: Clock, *, hub: Hub, logs: LogStore, sight: Sight = ALL
    ) -> None:
        self.sight = sight
        self._socket, self._hub, self._logs = socket, hub, logs
        self._wake, self._slow = asyncio.Event(), asyncio.Event()
        self._subscriptions: dict[int, Subscription] = {}
        self.queue = BrowserQueue(
            settings.browser_high_water_bytes,
            settings.browser_limit_bytes,
            settings.browser_slow_s,
            clock.monotonic,
            self._on_waiting,
        )

    def subscribe(
        self, number: int, job_id: str | None, parts: frozenset[str], log_offsets: dict[str, int]
    ) -> Subscription:
        """Begin a subscription; changes gather for it from now on. Raises PeerError on a number in use."""
        if number in self._subscriptions:
            raise PeerError(f"subscription {number} exists already")
        if len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
            raise PeerError(f"more than {MAX_SUBSCRIPTIONS} subscriptions on one connection")
        made = Subscription(number, job_id, parts, self.queue, dict(log_offsets), sight=self.sight)
        self._subscriptions[number] = made
        self._hub.add(made)
        return made

    def unsubscribe(self, number: int) -> None:
        """End a subscription; one that is not there is ended already."""
        subscription = self._subscriptions.pop(number, None)
        if subscription is not None:
            self._hub.remove(subscription)

    def close(self) -> None:
        """End every subscription."""
        for number in list(self._subscriptions):
            self.unsubscribe(number)

    async def run(self, meters: Instruments) -> None:
        """Send what waits, until cancelled. Raises SlowBrowser when the ladder is at its end."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_all())
                group.create_task(self._watch())
        except* SlowBrowser:
            meters.slow_closed.inc()
            raise
        finally:
            meters.dropped.inc(self.queue.dropped_rows)

    def _on_waiting(self) -> None:
        self._wake.set()
        if self.queue.slow:
            self._slow.set()

    async def _send_all(self) -> None:
        while True:
            self._wake.clear()
            if not await self._send_round():
                await self._wake.wait()

    async def _watch(self) -> None:
        await self._slow.wait()  # the sender may hang in the transport, so it cannot be the one who notices
        raise SlowBrowser

    async def _send_round(self) -> bool:
        now = self.queue.take()
        if now is None:
            return False
        for message in now.messages:
            await self._send(message)
        for wish in now.logs:
            await self._send_log(wish)
        for item in now.stream:
            await self._send(item)
        return True

    async def _send(self, item: bytes | ServerMessage | Encoded) -> None:
        try:
            async with asyncio.timeout(SEND_DEADLINE_S):
                if isinstance(item, bytes):
                    await self._socket.send_bytes(item)
                else:
                    await self._socket.send_text(item.text if isinstance(item, Encoded) else encode(item))
        except TimeoutError as error:
            raise SlowBrowser from error

    async def _send_log(self, wish: LogWish) -> None:
        subscription = self._subscriptions.get(wish.subscription)
        if subscription is None:
            return
        offset = subscription.log_offsets.get(wish.replica_id, 0)
        piece = self._logs.read(wish.job_id, wish.replica_id, offset, LOG_PIECE_BYTES)
        if piece.next_offset == offset:
            return
        subscription.log_offsets[wish.replica_id] = piece.next_offset
        times = self._logs.times(wish.job_id, wish.replica_id, offset, piece.next_offset)
        added = LogAdded(
            type="log", id=wish.subscription, replica_id=wish.replica_id, offset=offset, text=piece.text, times=times
        )  # fmt: skip
        await self._send(added)
        more = LogWish(wish.subscription, wish.job_id, wish.replica_id, piece.next_offset)
        self.queue.put_log(more)  # read on until there is nothing, other messages in between


def replay(subscription: Subscription, frames: list[bytes], replicas: dict[int, str]) -> None:
    """Queue recorded frames for one subscription; a GRAPH_USED among them becomes its message."""
    for frame in frames:
        header = decode_header(frame)
        if header.kind is Kind.GRAPH_USED:
            body = decode(frame).body
            replica_id, used = replicas.get(header.stream, ""), str(body.get("hash", ""))
            offer(subscription, None, StreamGraph(replica_id=replica_id, stream=header.stream, hash=used))
        else:
            offer(subscription, header, frame)
