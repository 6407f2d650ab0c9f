"""Websockets by the token that opened them, so that a token which opens nothing any more keeps none open either."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import or_, select

from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.tables import TokenRow

_AT_ONCE = 500


class Held:
    """Open websockets. One event loop."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db, self._clock = database, clock
        self._ends: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def by(self, token_id: str) -> Iterator[asyncio.Event]:
        """Note a websocket while the block runs; the event that it gives is set when its token is void."""
        end = asyncio.Event()
        self._ends.setdefault(token_id, set()).add(end)
        try:
            yield end
        finally:
            self._ends[token_id].discard(end)
            if not self._ends[token_id]:
                del self._ends[token_id]

    async def step(self) -> None:
        """End the websockets of tokens that were revoked or have expired."""
        ids = sorted(self._ends)
        for start in range(0, len(ids), _AT_ONCE):
            statement = select(TokenRow.id).where(
                TokenRow.id.in_(ids[start : start + _AT_ONCE]),
                or_(TokenRow.revoked_at.is_not(None), TokenRow.expires_at <= self._clock.now()),
            )
            async with self._db.glance() as session:
                void = (await session.execute(statement)).scalars().all()
            for token_id in void:
                for end in self._ends.get(token_id, ()):
                    end.set()
