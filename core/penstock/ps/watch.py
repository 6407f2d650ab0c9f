"""Who keeps a server waiting, and for how long it waits. No clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import Unavailable
from penstock.ps.desk import Desk
from penstock.ps.rounds.sync import SyncRounds
from penstock.ps.settings import ServerSettings

START_EVERY_S = 3.0


class Watch:
    """Looks now and then; says who is missing every 3 s at the start, once a lease in a round."""

    def __init__(self, settings: ServerSettings, desk: Desk, now: float) -> None:
        self._settings, self._desk = settings, desk
        self._began = self._said = now
        self._waiting_since = now
        self._empty_since: float | None = None

    def look(self, now: float) -> str:
        """Return what there is to say, or ''. Raises Unavailable when nobody comes."""
        with self._desk.still():
            machine = self._desk.machine
            members = machine.members
            missing = members.missing()
            is_empty = members.all_lost
            waits_for = machine.waits_for() if isinstance(machine, SyncRounds) else []
            number = machine.round if isinstance(machine, SyncRounds) else 0
        if missing:
            return self._start(missing, now)
        if is_empty:
            return self._empty(now)
        self._empty_since = None
        if not waits_for:
            self._waiting_since = now
        elif now - self._waiting_since >= self._settings.lease_s:
            self._waiting_since = now
            return f"round {number} waits for {_named(waits_for)}"
        return ""

    def _start(self, missing: Sequence[int], now: float) -> str:
        limit_s = self._settings.start_s
        if now - self._began >= limit_s:
            raise Unavailable(
                f"{_named(missing)} of {self._settings.fanin} did not join {self._settings.endpoint} within "
                f"{limit_s:g} s (PENSTOCK_PS_START_S). Are they started, with this endpoint and job?"
            )
        if now - self._said < START_EVERY_S:
            return ""
        self._said = now
        return f"waits for {_named(missing)} of {self._settings.fanin} to join ({now - self._began:.0f} s)"

    def _empty(self, now: float) -> str:
        limit_s = self._settings.start_s
        if self._empty_since is None:
            self._empty_since = now
            return f"every trainer is lost; waits {limit_s:g} s for one to come back"
        if now - self._empty_since >= limit_s:
            raise Unavailable(f"every trainer was lost, and none came back within {limit_s:g} s (PENSTOCK_PS_START_S)")
        return ""


def _named(trainers: Sequence[int]) -> str:
    return ("trainer " if len(trainers) == 1 else "trainers ") + ", ".join(map(str, trainers))
