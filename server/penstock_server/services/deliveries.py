"""Sender of the outbox of webhooks: in order, at least once, with back-off, until a webhook is disabled.

Of a webhook one delivery is in flight at a time, and the next is sent once that was answered with 2xx. After a failure
the webhook pauses (`webhookrules.pause_after`); after `MAX_FAILURES` in a row, or a 410, it is disabled, with a reason.
No transaction is open during a request: a server that is killed then sends the delivery again. Each webhook has a task
of its own, so that a slow receiver delays no other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Protocol

import structlog
from sqlalchemy import select

from penstock_server.clock import Clock
from penstock_server.db import Database, DatabaseAway, TakenOver
from penstock_server.services.webhookrules import GONE, MAX_FAILURES, headers_of, pause_after
from penstock_server.services.webhooks import Webhooks
from penstock_server.tables import WebhookDeliveryRow, WebhookRow
from penstock_server.webhooksender import NotSent

log = structlog.get_logger(__name__)

BATCH = 20
"""Deliveries of a webhook that are read at once."""
LOOK_EVERY_S = 0.5
AGAIN = timedelta(seconds=1)
"""Pause of a webhook after an error of the server itself, such as an unreachable database; then twice as long."""
MOST_DOUBLINGS = 8
LOAD_EVERY_S = 60.0
"""So often every webhook is looked at: a commit whose outcome stayed unknown has marked none."""
_AT_ONCE = datetime.min.replace(tzinfo=UTC)
MAX_ERROR = 1000


class Post(Protocol):
    """Sends one request, and returns the status of the answer. Raises NotSent."""

    async def post(self, url: str, headers: dict[str, str], body: str) -> int:
        """Send."""


class _Removed(Exception):
    """The webhook was removed, or the delivery."""


class Deliveries:
    """The sender of a server's outbox. `run` owns its tasks; `mark` and `stop` are called from the same event loop."""

    name = "webhooks"

    def __init__(self, database: Database, clock: Clock, webhooks: Webhooks, sender: Post) -> None:
        self._db, self._clock, self._webhooks, self._sender = database, clock, webhooks, sender
        self._due: dict[str, datetime] = {}  # webhooks that may have something to send, and when to look
        self._busy: set[str] = set()
        self._in_flight: set[asyncio.Timeout] = set()
        self._woken = asyncio.Event()
        self._troubles: dict[str, int] = {}  # errors of the server itself in a row, by webhook
        self._ends = asyncio.Event()
        self._stopping = False
        self._chance = random.SystemRandom()  # an own one: a test may seed the process's

    def mark(self, webhook_ids: Iterable[str]) -> None:
        """Note webhooks for which a transaction that is committed has recorded something."""
        for webhook_id in webhook_ids:
            self._due[webhook_id] = _AT_ONCE
            self._woken.set()

    def stop(self) -> None:
        """Have `run` end. Requests in flight are given up, and sent again by the next server; transactions end."""
        self._stopping = True
        for limit in self._in_flight:
            limit.reschedule(asyncio.get_running_loop().time())
        self._woken.set()
        self._ends.set()

    async def run(self) -> None:
        """Send what is due until stopped, beginning with what an earlier server left."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._load())
            while not self._stopping:
                self._woken.clear()
                now = self._clock.now()
                for webhook_id in sorted(one for one, at in self._due.items() if at <= now and one not in self._busy):
                    del self._due[webhook_id]
                    self._busy.add(webhook_id)
                    group.create_task(self._turn(webhook_id))
                await self._wait(LOOK_EVERY_S if self._due else None)

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _load(self) -> None:
        while not self._stopping:
            pause_s = LOAD_EVERY_S
            try:
                self.mark(await self._webhooks.enabled())
            except (DatabaseAway, TakenOver) as error:
                log.warning("webhooks wait for the database", error=str(error))
                pause_s = AGAIN.total_seconds()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._ends.wait()

    async def _turn(self, webhook_id: str) -> None:
        troubles = self._troubles.pop(webhook_id, 0)
        again: datetime | None = self._clock.now() + AGAIN * 2 ** min(troubles, MOST_DOUBLINGS)
        try:
            again = await self._send_some(webhook_id)
        except _Removed:
            again = None
        except (DatabaseAway, TakenOver) as error:
            self._troubles[webhook_id] = troubles + 1
            log.warning("a webhook waits for the database", webhook=webhook_id, error=str(error))
        except Exception:  # a boundary: recorded and tried again
            self._troubles[webhook_id] = troubles + 1
            log.exception("deliveries failed", webhook=webhook_id)
        finally:
            self._busy.discard(webhook_id)
            if again is not None:
                self._due[webhook_id] = again
            self._woken.set()

    async def _send_some(self, webhook_id: str) -> datetime | None:
        """Send what waits, at most `BATCH`; return when to look again, or None if only a new event is a reason."""
        waiting = (
            select(WebhookDeliveryRow)
            .where(WebhookDeliveryRow.webhook_id == webhook_id, WebhookDeliveryRow.delivered_at.is_(None))
            .order_by(WebhookDeliveryRow.id)
            .limit(BATCH)
        )
        async with self._db.read() as session:
            hook = await session.get(WebhookRow, webhook_id)
            if hook is None or hook.disabled_at is not None:
                return None
            if hook.next_at is not None and self._clock.now() < hook.next_at:
                return hook.next_at
            rows = (await session.execute(waiting)).scalars().all()
        if rows and self._db.trouble is not None:  # what was sent could not be noted, and would be sent again
            await self._db.try_to_write()
        for row in rows:
            again = await self._deliver(hook, row)
            if again is not None or self._stopping:
                return again
        return _AT_ONCE if len(rows) == BATCH else None

    async def _deliver(self, hook: WebhookRow, row: WebhookDeliveryRow) -> datetime | None:
        """Attempt one delivery; return when to look again if it failed, else None."""
        headers = headers_of(row.id, row.body, hook.secret, self._clock.now())
        status, error = None, ""
        try:
            async with asyncio.timeout(0 if self._stopping else None) as limit:
                self._in_flight.add(limit)
                try:
                    status = await self._sender.post(hook.url, headers, row.body)
                finally:
                    self._in_flight.discard(limit)
        except TimeoutError:  # this server stops
            return None
        except NotSent as failure:
            error = str(failure)[:MAX_ERROR]
        is_good = status is not None and 200 <= status < 300
        return await self._note(hook.id, row.id, status, error or ("" if is_good else f"answered with {status}"))

    async def _note(self, webhook_id: str, delivery_id: str, status: int | None, error: str) -> datetime | None:
        now = self._clock.now()
        async with self._db.write() as tx:
            hook = await tx.session.get(WebhookRow, webhook_id)
            row = await tx.session.get(WebhookDeliveryRow, delivery_id)
            if hook is None or row is None:
                raise _Removed
            row.attempts += 1
            row.status, row.error = status, error
            if not error:
                row.delivered_at, hook.failures, hook.next_at = now, 0, None
                if hook.disabled_at is None:
                    hook.reason = ""
                return None
            _failed(hook, status, error, now, self._chance.random())
            if hook.disabled_at is not None:
                self._webhooks.forget()
        return hook.next_at or _AT_ONCE


def _failed(hook: WebhookRow, status: int | None, error: str, now: datetime, chance: float) -> None:
    hook.failures += 1
    hook.reason = error
    hook.next_at = now + pause_after(hook.failures, chance)
    if hook.failures >= MAX_FAILURES or status == GONE:
        hook.disabled_at, hook.next_at = now, None
        is_gone = status == GONE
        hook.reason = f"disabled: {error}" if is_gone else f"disabled after {hook.failures} failures in a row: {error}"
