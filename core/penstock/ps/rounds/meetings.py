"""Meetings: all live members come together, and each is told what all of them have brought.

a meeting     closes when all expected trainers have joined the job once, and every member is there. Who is lost or
              leaves is waited for no more, and what it brought is forgotten
a number      each meeting has one, and a trainer asks for its next by it, so a request may be repeated: before the
              meeting it waits, after it it is told the same again. Only the last meeting is remembered. Whoever was
              lost during it is told, too: to the others it is over
a joiner      asks for the number that comes next first (number -1), since others may have met before
a restart     of the server forgets all. Numbers go on with the highest that is asked for; who asks for a lower one had
              its answer lost together with the server, and is refused

Pure; what is brought is never looked at.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from penstock.ps.members import Membership
from penstock.ps.messages import Answer, Instruction, Meet, Met, Refuse, Sender, Ticket


@dataclass(slots=True)
class _Here:
    """A trainer that waits. `tickets`: of the same request, repeated."""

    sender: Sender
    number: int
    part: object
    tickets: list[Ticket]


class Meetings:
    """The meetings at one server, whose members are `members`. Not thread-safe."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._next = 0
        self._last: tuple[object, ...] = ()
        self._here: dict[int, _Here] = {}

    @property
    def waiting(self) -> AbstractSet[int]:
        """Trainers that are there, and wait for the others."""
        return self._here.keys()

    def meet(self, event: Meet, round: int) -> list[Instruction]:
        """Take a member's request. `round`: the open round, of which it is told."""
        trainer, number = event.sender.trainer, event.number
        if number < 0:
            return [Answer(event.ticket, max([self._next, *(here.number for here in self._here.values())]))]
        if self._next and number == self._next - 1:
            return [Met(event.ticket, round, self._last)]
        if number < self._next or (self._next and number > self._next):
            reason = (
                f"trainer {trainer} asks for meeting {number}, but the next is {self._next}: was it taken for lost?"
            )
            return [Refuse(event.ticket, reason)]
        here = self._here.get(trainer)
        if here is not None and (here.sender, here.number) == (event.sender, number):
            here.tickets.append(event.ticket)
            return []
        replaced = (
            [] if here is None else [Refuse(t, f"trainer {trainer} asks for another meeting") for t in here.tickets]
        )
        self._here[trainer] = _Here(event.sender, number, event.part, [event.ticket])
        return list(replaced)

    def settle(self, round: int) -> list[Instruction]:
        """Let go of who is a member no more, and close the meeting if all are there. After every event."""
        out: list[Instruction] = []
        for here in [here for here in self._here.values() if self._members.is_new(here.sender)]:
            out += self._send_away(
                here, f"trainer {here.sender.trainer} is no member (its lease ran out?)", rejoin=True
            )
        if not self._here or not self._members.started or self._members.present() - self._here.keys():
            return out
        number = max(here.number for here in self._here.values())
        behind = [here for here in self._here.values() if here.number < number]
        for here in behind:
            lost = f"what came of meeting {here.number} was lost when the server was started again"
            out += self._send_away(here, lost, rejoin=False)
        if behind:
            return out
        self._last, self._next = tuple(self._here[t].part for t in sorted(self._here)), number + 1
        out += [Met(ticket, round, self._last) for here in self._here.values() for ticket in here.tickets]
        self._here.clear()
        return out

    def _send_away(self, here: _Here, reason: str, *, rejoin: bool) -> list[Instruction]:
        del self._here[here.sender.trainer]
        return [Refuse(ticket, reason, rejoin=rejoin) for ticket in here.tickets]
