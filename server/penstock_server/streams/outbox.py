"""Messages to one peer that never pile up: under one key only the newest waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


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

    async def get(self) -> str | None:
        """Return the next message, or None once the box is closed."""
        while True:
            if self.closed_with is not None:
                return None
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            self._event.clear()
            await self._event.wait()
