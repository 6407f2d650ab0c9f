"""Identifiers after a restart: larger than all that are stored, also if the clock was set back in between."""

from __future__ import annotations

from sqlalchemy import func, select, union_all

from penstock_server.db import Database
from penstock_server.tables import (
    AttemptRow,
    AuditRow,
    EventRow,
    JobRow,
    NodeRow,
    ReplicaRow,
    TokenRow,
    WebhookDeliveryRow,
    WebhookRow,
)
from penstock_server.uuid7 import go_on_after

_NAMED = (JobRow, AttemptRow, NodeRow, ReplicaRow, TokenRow, EventRow, AuditRow, WebhookRow, WebhookDeliveryRow)
"""Tables whose rows have identifiers of their own. The newest of each is one step in its index."""


async def go_on(database: Database) -> None:
    """Have identifiers go on after the newest that is stored."""
    newest = union_all(*(select(func.max(row.id)) for row in _NAMED))
    async with database.glance() as session:
        for found in (await session.execute(newest)).scalars():
            if found is not None:
                go_on_after(found)
