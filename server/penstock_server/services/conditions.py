"""Conditions of the server: what keeps it from storing what it receives, since when, and what to do about it.

Looked at once a tick, and in memory, so that they can be read while the database cannot. A disk is full when the state
folder's has less than `diagnosis.FULL_BYTES` free, or when a write of the database failed for it. A database whose
packets vanish is noticed once its driver gives up, 30 s after its last answer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import structlog
from sqlalchemy import select

from penstock.protocol.agent import DiskSpace
from penstock_server.clock import Clock
from penstock_server.db import Database, DatabaseAway
from penstock_server.diskspace import free_of, is_full
from penstock_server.schemas.conditions import ConditionCode, ServerCondition
from penstock_server.tables import CounterRow

log = structlog.get_logger(__name__)

_SPOOLED = "agents keep logs, metrics and telemetry on the disks of their nodes and send them afterwards"
_REFUSED = "submissions and other changes are refused with 503"


@dataclass(frozen=True, slots=True)
class Words:
    """What a condition is called, what goes on meanwhile, and what to do."""

    summary: str
    meanwhile: str
    advice: str


WORDS: Mapping[ConditionCode, Words] = {
    "database_away": Words(
        "The server's database cannot be used",
        f"Running jobs go on; {_SPOOLED}; {_REFUSED}.",
        "Start the database, or restore the network to it. The server reconnects by itself.",
    ),
    "database_damaged": Words(
        "The server's database is damaged",
        f"Running jobs go on; {_SPOOLED}; {_REFUSED}.",
        "Stop the server, and restore a backup into a new state folder: penstock restore FILE.",
    ),
    "storage_full": Words(
        "The server's disk is full",
        f"Running jobs go on; {_SPOOLED}; {_REFUSED}.",
        "Free disk space on the server, or lower its retention and quotas.",
    ),
}
assert WORDS.keys() == set(get_args(ConditionCode))


class Conditions:
    """The conditions of one server. `changed` is called with all of them, as JSON, when one has come or gone."""

    def __init__(
        self, database: Database, clock: Clock, state_dir: Path, changed: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._db, self._clock, self._state_dir, self._changed = database, clock, state_dir, changed
        self._now: dict[ConditionCode, ServerCondition] = {}

    def all(self) -> list[ServerCondition]:
        """Return the conditions of the last look."""
        return list(self._now.values())

    def views(self) -> list[dict[str, Any]]:
        """Return them as browsers get them."""
        return [one.model_dump(mode="json") for one in self._now.values()]

    async def step(self) -> None:
        """Look at the database and the disk."""
        found = await self._troubles()
        now = self._clock.now()
        looked = {code: _condition(code, detail, self._now.get(code), now) for code, detail in found.items()}
        come, gone = looked.keys() - self._now.keys(), self._now.keys() - looked.keys()
        self._now = looked
        for code in sorted(come):
            log.error("the server cannot store what it receives", condition=code, detail=looked[code].detail)
        for code in sorted(gone):
            log.warning("the condition is over", condition=code)
        if come or gone:
            self._changed(self.views())

    async def _troubles(self) -> dict[ConditionCode, str]:
        found: dict[ConditionCode, str] = {}
        try:
            await check(self._db)
        except DatabaseAway as error:
            found[_code_of(error)] = error.fields.get("cause") or str(error)
        space = shutil.disk_usage(self._state_dir)
        disk = DiskSpace(free_bytes=space.free, total_bytes=space.total)
        if is_full(disk):
            found["storage_full"] = f"{free_of(disk)} on the disk of the state folder"
        return found


async def check(database: Database) -> None:
    """See that a database answers, and takes writes if one has failed. Raises DatabaseAway."""
    if database.trouble is not None:
        await database.try_to_write()
    async with database.glance() as session:
        await session.execute(select(CounterRow.value).limit(1))  # of a table: of SQLite nothing else reads the file


def _code_of(error: DatabaseAway) -> ConditionCode:
    return next((code for code in WORDS if code == error.code), "database_away")


def _condition(code: ConditionCode, detail: str, before: ServerCondition | None, now: datetime) -> ServerCondition:
    """Return a condition; one that was there before keeps its begin, and what was said of it then."""
    if before is not None:
        return before
    words = WORDS[code]
    return ServerCondition(
        code=code, since=now, summary=words.summary, detail=detail, meanwhile=words.meanwhile, advice=words.advice
    )
