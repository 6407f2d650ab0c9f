"""Webhooks, and the outbox of deliveries to them.

A delivery is a row of the transaction that changed the job: if the change is there, so is the delivery, whatever
happens to the server then. `Deliveries` sends them, of a webhook one after another, in the order of the events.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.problems import NotFound, Problem
from penstock_server.schemas import api
from penstock_server.schemas import webhooks as schemas
from penstock_server.services.pages import from_token, to_token
from penstock_server.services.views import columns
from penstock_server.services.webhookrules import JOB_STATE, TEST, body_of, new_secret
from penstock_server.tables import EventRow, JobRow, WebhookDeliveryRow, WebhookRow
from penstock_server.uuid7 import uuid7
from penstock_server.webhooksender import Network, Refused, require_allowed

MAX_WEBHOOKS = 100
MAX_OF_PROJECT = 20
Projects = Collection[str] | None
"""Of which projects the asker is an administrator; None: of all. Other webhooks do not exist for it."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What an enabled webhook wants. `project`: None for the jobs of all."""

    webhook_id: str
    events: frozenset[str]
    project: str | None


class Webhooks:
    """The webhooks of one server, and what transactions record for them.

    The enabled ones are cached between transactions. Whatever changes them drops the cache within its transaction,
    that is while it holds the lock of writes, and the next transaction with an event reads them again: so the cache
    is never older than the rows, also if that transaction was rolled back or its task cancelled.
    """

    def __init__(self, database: Database, clock: Clock, allowed: Sequence[Network]) -> None:
        self._db, self._clock, self._allowed = database, clock, allowed
        self._enabled: list[Subscription] | None = None

    async def enabled(self) -> set[str]:
        """Return the ids of the webhooks that are not disabled."""
        async with self._db.glance() as session:
            return {one.webhook_id for one in await _subscriptions(session)}

    def forget(self) -> None:
        """Read the webhooks again at the next event. Called within the transaction that changes them."""
        self._enabled = None

    async def record(self, tx: Tx) -> None:
        """Add a delivery for each webhook that wants a change of state in this transaction."""
        changes = [one for one in tx.effects.events if one.kind == "job" and one.from_state != one.to_state]
        if not changes:
            return
        if self._enabled is None:
            self._enabled = await _subscriptions(tx.session)
        for event in changes if self._enabled else ():
            await self._record(tx, event, self._enabled)

    async def _record(self, tx: Tx, event: EventRow, enabled: Sequence[Subscription]) -> None:
        wanted = [one for one in enabled if event.to_state in one.events]
        job = await tx.session.get(JobRow, event.subject) if wanted else None  # in the session's identity map
        if job is None:
            return
        data = {
            "job_id": job.id, "name": job.name, "project": job.project, "attempt": job.attempt,
            "from": event.from_state, "to": event.to_state, "reason": event.reason, "detail": event.detail,
        }  # fmt: skip
        for one in wanted:
            if one.project in (None, job.project):
                body = body_of(JOB_STATE, event.at, data)
                tx.session.add(_delivery(one.webhook_id, JOB_STATE, body, event.at))
                tx.effects.webhooks.add(one.webhook_id)

    async def add(self, request: schemas.WebhookRequest) -> schemas.WebhookMade:
        """Create a webhook. Raises a problem if its address is not public, or there are too many."""
        self._check_address(request.url)
        async with self._db.write() as tx:
            await _require_room(tx.session, request.project)
            row = WebhookRow(
                id=uuid7(),
                url=request.url,
                events=[state.value for state in dict.fromkeys(request.events)],
                project=request.project,
                secret=request.secret or new_secret(),
                created_at=self._clock.now(),
                failures=0,
                reason="",
            )
            tx.session.add(row)
            tx.subject = row.id
            self.forget()
        return schemas.WebhookMade(**columns(schemas.WebhookMade, row))

    def _check_address(self, url: str) -> None:
        host = urlsplit(url).hostname or ""
        try:
            require_allowed(host, [host], self._allowed)
        except ValueError:  # a name: it is resolved and checked at each attempt
            return
        except Refused as error:
            raise Problem(409, "address_not_allowed", str(error), hint="give a public address") from error

    async def all(self, only: Projects = None) -> list[schemas.Webhook]:
        """List webhooks, oldest first."""
        statement = select(WebhookRow).order_by(WebhookRow.id)
        if only is not None:
            statement = statement.where(WebhookRow.project.in_(only))
        async with self._db.glance() as session:
            rows = (await session.execute(statement)).scalars().all()
        return [schemas.Webhook(**columns(schemas.Webhook, row)) for row in rows]

    async def remove(self, webhook_id: str, only: Projects = None) -> None:
        """Remove a webhook and its deliveries. Raises NotFound."""
        async with self._db.write() as tx:
            await _found(tx.session, webhook_id, only)
            tx.subject = webhook_id
            self.forget()
            await tx.session.execute(delete(WebhookRow).where(WebhookRow.id == webhook_id))

    async def enable(self, webhook_id: str, only: Projects = None) -> schemas.Webhook:
        """Resume a disabled or paused webhook at once, starting with the oldest pending delivery. Raises NotFound."""
        async with self._db.write() as tx:
            row = await _found(tx.session, webhook_id, only)
            tx.subject = webhook_id
            self.forget()
            row.failures, row.next_at, row.disabled_at, row.reason = 0, None, None, ""
            tx.effects.webhooks.add(webhook_id)
        return schemas.Webhook(**columns(schemas.Webhook, row))

    async def test(self, webhook_id: str, only: Projects = None) -> schemas.WebhookDelivery:
        """Queue a delivery of the type `test`. Raises NotFound, or a problem if the webhook is disabled."""
        now = self._clock.now()
        async with self._db.write() as tx:
            hook = await _found(tx.session, webhook_id, only)
            if hook.disabled_at is not None:
                raise Problem(
                    409, "webhook_disabled", f"webhook {webhook_id} is disabled: {hook.reason}", hint="enable it first"
                )
            row = _delivery(webhook_id, TEST, body_of(TEST, now, {"webhook_id": webhook_id}), now)
            tx.session.add(row)
            tx.subject = webhook_id
            tx.effects.webhooks.add(webhook_id)
        return schemas.WebhookDelivery(**columns(schemas.WebhookDelivery, row))

    async def deliveries(
        self, webhook_id: str, *, size: int, token: str | None, only: Projects = None
    ) -> api.Page[schemas.WebhookDelivery]:
        """List a webhook's deliveries, newest first. Raises NotFound."""
        of = WebhookDeliveryRow
        statement = select(of).where(of.webhook_id == webhook_id).order_by(of.id.desc()).limit(size + 1)
        after = from_token(token)
        if after is not None:
            statement = statement.where(of.id < after)
        async with self._db.read() as session:
            await _found(session, webhook_id, only)
            rows = (await session.execute(statement)).scalars().all()
        items = [schemas.WebhookDelivery(**columns(schemas.WebhookDelivery, row)) for row in rows[:size]]
        return api.Page(items=items, next_page_token=to_token(rows[size - 1].id) if len(rows) > size else None)


async def _subscriptions(session: AsyncSession) -> list[Subscription]:
    rows = (await session.execute(select(WebhookRow).where(WebhookRow.disabled_at.is_(None)))).scalars()
    return [Subscription(row.id, frozenset(row.events), row.project) for row in rows]


async def _require_room(session: AsyncSession, project: str | None) -> None:
    counts = select(WebhookRow.project, func.count()).group_by(WebhookRow.project)
    numbers = {row[0]: row[1] for row in await session.execute(counts)}
    limits = [(sum(numbers.values()), MAX_WEBHOOKS, "on this server")]
    if project is not None:  # so that those of one project leave room for the others
        limits.append((numbers.get(project, 0), MAX_OF_PROJECT, f"for project {project!r}"))
    for number, limit, where in limits:
        if number >= limit:
            detail = f"there are {number} webhooks {where} already, and {limit} is the limit"
            raise Problem(409, "too_many_webhooks", detail, hint="remove one first")


async def _found(session: AsyncSession, webhook_id: str, only: Projects) -> WebhookRow:
    row = await session.get(WebhookRow, webhook_id)
    if row is None or (only is not None and row.project not in only):
        raise NotFound("webhook", webhook_id)
    return row


def _delivery(webhook_id: str, kind: str, body: str, at: datetime) -> WebhookDeliveryRow:
    return WebhookDeliveryRow(
        id=uuid7(), webhook_id=webhook_id, type=kind, body=body, created_at=at, attempts=0, error=""
    )
