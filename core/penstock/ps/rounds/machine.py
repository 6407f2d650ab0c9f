"""What all round machines do with an event before it means something: who sent it, and is that a member."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.ps.members import Membership
from penstock.ps.messages import Barrier, Beat, Event, Instruction, Leave, Meet, Pull, Push, Release, Tick
from penstock.ps.rounds.meetings import Meetings


class RoundMachine:
    """Base of the machines of one pserver. Not thread-safe: one event at a time.

    `handlers`: event -> what answers it. Requests of strangers and of incarnations that were replaced are refused here,
    their payloads released; every request of a member renews its lease. Who was lost may still leave, and is waited for
    no more; a leave may be repeated.
    """

    handlers: Mapping[type, Callable[[Any], list[Instruction]]]

    def __init__(self, members: Membership) -> None:
        self.members, self.meetings = members, Meetings(members)
        self.now = 0.0  # of the event in progress
        self._ticked_at = math.inf  # not yet

    def _wake(self, tick: Tick) -> None:
        """Add to the leases what this server itself stood still: stopped, swapped out, without a turn of its CPU.

        It could not hear anybody meanwhile. What is short of a quarter of a lease costs no trainer its membership,
        since a beat is sent in the first half of a lease.
        """
        late_s = self.now - self._ticked_at - tick.every_s
        if late_s > max(tick.every_s, self.members.lease_s / 4):
            self.members.stood_still(late_s, self.now)
        self._ticked_at = self.now

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; `now` in seconds of any clock that only goes forward."""
        self.now = now
        if isinstance(event, Push | Barrier | Pull | Leave | Beat | Meet):
            refusal = self.members.refuse(event.ticket, event.sender)
            if refusal is None:
                self.members.touch(event.sender, now)
            elif not (isinstance(event, Leave) and self.members.is_gone(event.sender)):
                return [refusal, *([Release(event.payload)] if isinstance(event, Push) else [])]
        if isinstance(event, Tick):
            self._wake(event)
        out = self.handlers[type(event)](event)
        return [*out, *self.meetings.settle(self.open_round())] if self.meetings.waiting else out

    def open_round(self) -> int:
        """The open round; 0 where there are none."""
        return 0
